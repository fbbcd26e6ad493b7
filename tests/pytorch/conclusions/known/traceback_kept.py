"""Errors are caught and kept with their tracebacks, and so the frames' tensors.

cause: grows
device: 3 GiB
ends: oom
"""

import torch
from torch import nn


def layers(width, count):
    return nn.Sequential(*[m for _ in range(count) for m in (nn.Linear(width, width), nn.GELU())])


model = layers(1024, 4).cuda()
optimizer = torch.optim.AdamW(model.parameters())
errors = []


def validate():
    scratch = torch.ones(8192, 1024, device="cuda")  # the cause
    raise ValueError(f"bad sample of {scratch.shape}")


for step in range(200):
    try:
        validate()
    except ValueError as error:
        errors.append(error)
    model(torch.randn(2048, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
