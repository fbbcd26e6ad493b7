"""A scripted function makes what a list keeps.

cause: grows
device: 1 GiB
ends: oom
"""

import torch
from torch import nn


def layers(width, count):
    return nn.Sequential(*[m for _ in range(count) for m in (nn.Linear(width, width), nn.GELU())])


@torch.jit.script
def widen(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x], dim=0) * 2


model = layers(1024, 4).cuda()
optimizer = torch.optim.AdamW(model.parameters())
kept = []
for step in range(400):
    x = torch.randn(1024, 1024, device="cuda")
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    kept.append(widen(x))  # the cause
