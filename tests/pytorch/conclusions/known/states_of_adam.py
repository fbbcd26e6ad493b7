"""Weights and gradients fit; AdamW's states, made in the first step, do not.

cause: too_large
device: 4 GiB
ends: oom
never: no_grad|inference_mode|retain_graph|\.item\(\)
"""

import torch
from torch import nn


def layers(width, count):
    return nn.Sequential(*[m for _ in range(count) for m in (nn.Linear(width, width), nn.GELU())])


model = layers(4096, 24).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(10):
    model(torch.randn(64, 4096, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
