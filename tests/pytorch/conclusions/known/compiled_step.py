"""The batch of a compiled model (eager backend) is too large.

cause: too_large
device: 4 GiB
ends: oom
never: no_grad|inference_mode|retain_graph|\.item\(\)
"""

import torch
from torch import nn


def layers(width, count):
    return nn.Sequential(*[m for _ in range(count) for m in (nn.Linear(width, width), nn.GELU())])


model = layers(2048, 10).cuda()
compiled = torch.compile(model, backend="eager")
optimizer = torch.optim.AdamW(model.parameters())
for step in range(20):
    compiled(torch.randn(32768, 2048, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
