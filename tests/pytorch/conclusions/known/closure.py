"""A closure that is put off keeps the batch that it will work on.

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
later = []


def load():
    return torch.randn(4096, 1024, device="cuda")  # the cause


for step in range(200):
    batch = load()
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    later.append(lambda batch=batch: print(batch.mean()))
