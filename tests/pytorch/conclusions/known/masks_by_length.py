"""A cache of masks by length, and every length is new.

cause: cache
also: grows
device: 3 GiB
ends: oom
"""

import functools

import torch
from torch import nn


def layers(width, count):
    return nn.Sequential(*[m for _ in range(count) for m in (nn.Linear(width, width), nn.GELU())])


model = layers(1024, 4).cuda()
optimizer = torch.optim.AdamW(model.parameters())


@functools.lru_cache(maxsize=None)
def mask(length):
    return torch.ones(length, length, device="cuda").tril()  # the cause


for step in range(300):
    mask(2000 + 8 * step)
    model(torch.randn(2048, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
