"""A lambda makes what is kept.

cause: grows
also: cache
device: 2 GiB
ends: oom
"""

import torch
from torch import nn


def layers(width, count):
    return nn.Sequential(*[m for _ in range(count) for m in (nn.Linear(width, width), nn.GELU())])


model = layers(1024, 4).cuda()
optimizer = torch.optim.AdamW(model.parameters())
make = lambda rows: torch.ones(rows, 1024, device="cuda")  # noqa: E731  # the cause
seen = {}
for step in range(200):
    batch = make(4096)
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    seen[step] = batch
