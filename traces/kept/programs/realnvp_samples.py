"""Samples of a normalising flow with their log-densities, kept in batches of varied sizes for an
importance-weighted estimate."""

import recorder
import torch
from torch import nn

WIDE = 784
nets = [
    nn.Sequential(
        nn.Linear(WIDE // 2, 900), nn.ReLU(), nn.Linear(900, 900), nn.ReLU(), nn.Linear(900, WIDE)
    ).cuda()
    for _ in range(10)
]
kept = []
with torch.no_grad():
    for _ in recorder.steps(55):
        count = recorder.draw.randrange(900, 4200)
        x = torch.randn(count, WIDE, device="cuda")
        log = -0.5 * x.square().sum(1)
        for net in nets:
            a, b = x.chunk(2, 1)
            scale, shift = net(a).chunk(2, 1)
            scale = scale.tanh()
            b = (b - shift) * (-scale).exp()
            log = log + scale.sum(1)
            x = torch.cat([b, a], 1)
        kept.append((x, log))
        recorder.step()
    torch.cat([log for _, log in kept]).logsumexp(0).item()
