"""After ten steps a second network is trained as well, and the first step with both does not fit.

cause: too_large
device: 800MiB
ends: oom
never: To do: run it in torch.no_grad
"""

import torch
import torch.nn.functional as F
from torch import nn


def network():
    layers = [nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(10)]
    return nn.Sequential(*layers, nn.Linear(1024, 10)).cuda()


first, second = network(), network()
optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()])


def train_step(with_second):
    x, y = torch.randn(4096, 1024).cuda(), torch.randint(0, 10, (4096,)).cuda()
    loss = 0
    if with_second:
        loss = F.cross_entropy(second(x), y)
    loss = loss + F.cross_entropy(first(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


for step in range(20):
    train_step(step >= 10)
