"""Scores of many batches are kept with their graphs; activations are methods of tensors.

cause: no_grad
device: 1GiB
ends: oom
"""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x.mean(1)


net = Net().cuda().eval()
scores = []
for _ in range(1000):
    scores.append(net(torch.randn(512, 1024, device="cuda")))  # the cause
