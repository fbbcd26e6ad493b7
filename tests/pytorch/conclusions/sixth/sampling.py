"""A sampling loop with gradients on.

cause: no_grad
also: graph grows
device: 4GiB
ends: oom
"""

import torch
import torch.nn as nn


class UNet(nn.Module):
    def __init__(s, c=64):
        super().__init__()
        s.i = nn.Conv2d(3, c, 3, padding=1)
        s.m = nn.ModuleList(
            [
                nn.Sequential(nn.GroupNorm(8, c), nn.SiLU(), nn.Conv2d(c, c, 3, padding=1))
                for _ in range(8)
            ]
        )
        s.o = nn.Conv2d(c, 3, 3, padding=1)

    def forward(s, x, t):
        h = s.i(x)
        for b in s.m:
            h = h + b(h)
        return s.o(h)


ema = UNet().cuda().eval()


def sample(n=16, T=200):
    x = torch.randn(n, 3, 64, 64, device="cuda")
    frames = []
    for t in reversed(range(T)):
        eps = ema(x, t)  # the cause
        x = x - 0.01 * eps + 0.01 * torch.randn_like(x)  # the cause
        frames.append(x)  # the cause
    return x, frames


x, fr = sample()
print(x.shape)
