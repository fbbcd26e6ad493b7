"""A neural cellular automaton grows patterns; the colours of each generation are kept, and the pool
of all states at the end of a growth."""

import recorder
import torch
from torch import nn
from torch.nn import functional as F

CHANNELS, SIZE = 16, 90
sobel = torch.randn(CHANNELS * 3, 1, 3, 3, device="cuda")
rule = nn.Sequential(
    nn.Conv2d(48, 128, 1), nn.ReLU(), nn.Conv2d(128, CHANNELS, 1, bias=False)
).cuda()
film, pool = [], []
with torch.no_grad():
    for growth in range(3):
        x = torch.zeros(14, CHANNELS, SIZE, SIZE, device="cuda")
        for _ in recorder.steps(32):
            alive = F.max_pool2d(x[:, 3:4], 3, 1, 1) > 0.1
            y = rule(F.conv2d(x, sobel, padding=1, groups=CHANNELS))
            x = x + y * (torch.rand_like(x[:, :1]) < 0.5)
            x = x * (alive & (F.max_pool2d(x[:, 3:4], 3, 1, 1) > 0.1))
            film.append((x[:, :3].clamp(0, 1) * 255).byte())
            recorder.step()
        pool.append(x)
