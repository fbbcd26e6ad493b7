"""Gradients are accumulated over 16 small batches, but their losses wait for one backward.

cause: too_large
device: 1500 MiB
ends: oom
never: gradients can be accumulated
"""

import torch
from torch import nn

model = nn.Sequential(*[m for _ in range(8) for m in (nn.Linear(1024, 1024), nn.GELU())]).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(20):
    losses = []
    for small in range(16):
        x = torch.randn(2048, 1024, device="cuda")
        losses.append(model(x).pow(2).mean())
    torch.stack(losses).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
