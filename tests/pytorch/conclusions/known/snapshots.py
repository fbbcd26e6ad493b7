"""Every fifth step the weights are copied for a best-model list that nothing bounds.

cause: grows
also: cache
device: 2 GiB
ends: oom
"""

import copy

import torch
from torch import nn


def layers(width, count):
    return nn.Sequential(*[m for _ in range(count) for m in (nn.Linear(width, width), nn.GELU())])


model = layers(1024, 8).cuda()
optimizer = torch.optim.AdamW(model.parameters())
best = []
for step in range(400):
    model(torch.randn(512, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 4:
        best.append(copy.deepcopy(model.state_dict()))  # the cause
