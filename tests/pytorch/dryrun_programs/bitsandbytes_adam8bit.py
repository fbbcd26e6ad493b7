"""bitsandbytes: Adam with states of 8 bits, three steps."""

import bitsandbytes
import torch
from torch import nn

model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))).cuda()
optimizer = bitsandbytes.optim.Adam8bit(model.parameters(), lr=1e-3)
for _ in range(3):
    model(torch.randn(64, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
assert optimizer.state[model[0].weight]["state1"].dtype == torch.uint8
