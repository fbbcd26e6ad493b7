"""Each fold is given an averaged copy of its weights (EMA), and the copies of past folds stay.

cause: grows
device: 1 GiB
ends: oom
never: with their|copy\.py|of a loss or a metric
"""

import copy

import torch
from torch import nn


class Average:
    def __init__(self, model, decay=0.99):
        self.module = copy.deepcopy(model).eval().requires_grad_(False)  # the cause
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        pairs = zip(self.module.state_dict().values(), model.state_dict().values())
        for mine, new in pairs:
            mine.lerp_(new, 1 - self.decay)


def level(depth, width):
    inner = level(depth - 1, width) if depth else nn.Identity()
    return nn.Sequential(nn.Linear(width, width), nn.GELU(), inner)


kept = []
model = level(6, 1024).cuda()
optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
for fold in range(50):
    average = Average(model)
    for _ in range(4):
        out = model(torch.randn(64, 1024, device="cuda"))
        optimizer.zero_grad()
        out.square().mean().backward()
        optimizer.step()
        average.update(model)
    kept.append(average)
