"""A server keeps all pictures; one that does not fit is refused, and its error is let go of.

cause: grows
also:  collects
device: 1 GiB
ends: oom
never: let go of the exception
"""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Conv2d(4 if number == 0 else 64, 64, 3, padding=1) for number in range(8)
        )

    def forward(self, x):
        skips = []
        for layer in self.layers:
            x = layer(x)
            skips.append(x)
        while skips:
            x = x + skips.pop()  # the cause
        return x  # the cause


net = Net().cuda().half()
pictures = []


@torch.inference_mode()
def generate(size):
    return net(torch.randn(1, 4, size, size, device="cuda", dtype=torch.half))


for number in range(200):
    size = 1024 if number in (20, 50) else 256
    try:
        pictures.append(generate(size))  # the cause
    except torch.OutOfMemoryError:
        if size == 256:
            raise
