"""Losses are summed with their graphs, and no backward ever runs.

cause: graph
also: no_grad grows
device: 2GiB
ends: oom
"""

import torch
import torch.nn as nn


class RNN(nn.Module):
    def __init__(s):
        super().__init__()
        s.l = nn.LSTM(512, 1024, 2, batch_first=True)
        s.o = nn.Linear(1024, 1000)

    def forward(s, x, h=None):
        y, h = s.l(x, h)  # the cause
        return s.o(y), h


m = RNN().cuda()
opt = torch.optim.Adam(m.parameters())
h = None
total = 0.0
for step in range(400):
    x = torch.randn(32, 64, 512, device="cuda")
    y = torch.randint(0, 1000, (32, 64), device="cuda")
    o, h = m(x, h)  # the cause
    loss = nn.functional.cross_entropy(o.flatten(0, 1), y.flatten())
    pass
    total += loss  # the cause
print(total / 400)
