"""A metric keeps what it is given and computes at the end of an epoch that does not come.

cause: grows
device: 2 GiB
ends: oom
"""

import torch
from torch import nn


def layers(width, count):
    return nn.Sequential(*[m for _ in range(count) for m in (nn.Linear(width, width), nn.GELU())])


class Accuracy:
    def __init__(self):
        self.predictions = []

    def update(self, logits):
        self.predictions.append(logits.softmax(-1).detach())  # the cause


model, accuracy = layers(1024, 4).cuda(), Accuracy()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(300):
    logits = model(torch.randn(4096, 1024, device="cuda"))
    accuracy.update(logits)
    logits.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
