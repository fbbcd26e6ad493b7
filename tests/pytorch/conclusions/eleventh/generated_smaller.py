"""A picture does not fit; it is tried again, each time of half the size, and the errors are kept.

cause: too_large
device: 1 GiB
ends: oom
never: fewer requests|shorter inputs
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
            x = x + skips.pop()
        return x


net = Net().cuda().half()
errors = []


@torch.inference_mode()
def generate(size):
    return net(torch.randn(1, 4, size, size, device="cuda", dtype=torch.half))


for size in (1024, 512, 256):
    try:
        generate(size)
        break
    except torch.OutOfMemoryError as error:
        errors.append(error)
generate(512)
