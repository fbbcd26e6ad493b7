"""After five steps an evaluation without no_grad collects its outputs.

cause: no_grad
device: 4 GiB
ends: oom
"""

import torch
from torch import nn


def layers(width, count):
    return nn.Sequential(*[m for _ in range(count) for m in (nn.Linear(width, width), nn.GELU())])


model = layers(1024, 8).cuda()
optimizer = torch.optim.AdamW(model.parameters())


def evaluate(batches):
    model.eval()
    outputs = []
    for _ in range(batches):
        outputs.append(model(torch.randn(4096, 1024, device="cuda")))  # the cause
    return torch.cat(outputs)


for epoch in range(3):
    model.train()
    for step in range(5):
        model(torch.randn(2048, 1024, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    evaluate(100)
