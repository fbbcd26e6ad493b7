"""Patch features of a data set, kept on the GPU, with small results of each batch beside them.

cause: grows
also:  collects
device: 320 MiB
ends: oom
never: the weights are the most
"""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width, stride):
        super().__init__()
        self.down = nn.Conv2d(width // stride, width, stride, stride)
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 7, padding=3, groups=width),
            nn.GroupNorm(1, width),
            nn.Conv2d(width, 4 * width, 1),
            nn.GELU(),
            nn.Conv2d(4 * width, width, 1),
        )

    def forward(self, x):
        x = self.down(x)
        return x + self.body(x)  # the cause


def encoder():
    widths = [96, 192, 384, 768]
    return nn.Sequential(
        nn.Conv2d(3, 96, 4, 4), Block(96, 1), *[Block(width, 2) for width in widths[1:]],
        *[Block(768, 1) for _ in range(4)],
    )


model = encoder().cuda().eval()
patches, pooled, labels = [], [], []
with torch.no_grad():
    for batch in range(400):
        images = torch.randn(16, 3, 160, 160).cuda()
        found = model(images)  # the cause
        patches.append(found)  # the cause
        pooled.append(found.mean((2, 3)))
        labels.append(torch.randint(10, (16,)).cuda())
bank = torch.cat(patches)
