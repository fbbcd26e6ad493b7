"""Predictions are kept with their graphs by a model whose activations are functions; nothing is
trained.

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


def predict(net, batches):
    outputs = []
    for _ in range(batches):
        outputs.append(net(torch.randn(256, 1024).cuda()))  # the cause
    return torch.cat(outputs)


predict(Net().cuda().eval(), 1000)
