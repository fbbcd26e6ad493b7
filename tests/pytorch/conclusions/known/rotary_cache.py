"""A server keeps the rotary tables of each length of text; gradients are on, but nothing that it
keeps has a graph.

cause: cache
also: grows, too_large
device: 1GiB
ends: oom
never: no_grad|inference_mode
"""

import torch
from torch import nn


class Rotary(nn.Module):
    def __init__(self, dim=256):
        super().__init__()
        self.register_buffer("speeds", 10000.0 ** (-torch.arange(0, dim, 2) / dim))
        self.head = nn.Linear(dim, 1)
        self.tables = {}

    def forward(self, x):
        length = x.shape[0]
        if length not in self.tables:
            angles = torch.arange(length, device=x.device)[:, None] * self.speeds
            self.tables[length] = angles.cos(), angles.sin()  # the cause
        cosines, sines = self.tables[length]
        x = torch.cat([x[:, ::2] * cosines, x[:, 1::2] * sines], 1)
        return self.head(x.mean(0))


def serve(net):
    for length in range(1000, 9000):
        net(torch.randn(length, 256, device="cuda")).item()


serve(Rotary().cuda().eval())
