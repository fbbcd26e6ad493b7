"""Predictions are cloned into a list in each step.

cause: grows
device: 2 GiB
ends: oom
"""

import torch
from torch import nn


def layers(width, count):
    return nn.Sequential(*[m for _ in range(count) for m in (nn.Linear(width, width), nn.GELU())])


model = layers(1024, 4).cuda()
optimizer = torch.optim.AdamW(model.parameters())
kept = []
for step in range(200):
    output = model(torch.randn(4096, 1024, device="cuda"))
    output.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    kept += [part.clone() for part in output.detach().chunk(4)]  # the cause
