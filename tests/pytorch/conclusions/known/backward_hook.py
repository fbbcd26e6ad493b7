"""A hook on a parameter keeps each gradient.

cause: grows
also: hooks
device: 3 GiB
ends: oom
"""

import torch
from torch import nn


def layers(width, count):
    return nn.Sequential(*[m for _ in range(count) for m in (nn.Linear(width, width), nn.GELU())])


model = layers(2048, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
gradients = []
for parameter in model.parameters():
    parameter.register_hook(lambda gradient: gradients.append(gradient.clone()))  # the cause
for step in range(200):
    model(torch.randn(512, 2048, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
