"""The classic: the losses are added up with their graphs.

cause: graph
device: 4 GiB
ends: oom
"""

import torch
from torch import nn


def layers(width, count):
    return nn.Sequential(*[m for _ in range(count) for m in (nn.Linear(width, width), nn.GELU())])


model = layers(1024, 6).cuda()
optimizer = torch.optim.AdamW(model.parameters())
total = 0.0
for step in range(200):
    x = torch.randn(2048, 1024, device="cuda")
    output = model(x)  # the cause
    loss = output.square().mean()
    loss.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    total += loss  # the cause
