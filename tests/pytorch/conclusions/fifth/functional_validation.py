"""After a training, an evaluation sums the losses of many batches with their graphs; the model's
activations are functions.

cause: no_grad
device: 1GiB
ends: oom
"""

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(1024, 4096)
        self.second = nn.Linear(4096, 4096)
        self.third = nn.Linear(4096, 10)

    def forward(self, x):
        x = F.relu(self.first(x))
        x = F.relu(self.second(x))
        return self.third(x)


net = Net().cuda()
optimizer = torch.optim.AdamW(net.parameters())


def batch():
    return torch.randn(256, 1024).cuda(), torch.randint(0, 10, (256,)).cuda()


for step in range(30):
    x, y = batch()
    F.cross_entropy(net(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def evaluate():
    net.eval()
    total = 0
    for _ in range(1000):
        x, y = batch()
        total = total + F.cross_entropy(net(x), y)  # the cause
    return total


evaluate()
