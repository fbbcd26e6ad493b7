"""The weights fit, the states of the optimiser do not.

cause: too_large
device: 4GiB
ends: oom
never: smaller batch|checkpoint|no_grad
"""

import torch
from torch import nn

net = nn.Sequential(*[nn.Linear(4096, 4096, device="cuda") for _ in range(20)])
optimizer = torch.optim.AdamW(net.parameters())
for step in range(10):
    net(torch.randn(8, 4096, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
