"""The trainers of past folds are kept, with models and optimisers.

cause: grows
also: optimizer_twice
device: 1 GiB
ends: oom
never: of a loss or a metric
"""

import torch
from torch import nn


class Trainer:
    def __init__(s):
        s.m = nn.Sequential(
            *[x for _ in range(8) for x in (nn.Linear(1024, 1024), nn.ReLU())]
        ).cuda()
        s.opt = torch.optim.Adam(s.m.parameters())

    def fit(s):
        for step in range(6):
            x = torch.randn(2048, 1024, device="cuda")
            loss = s.m(x).square().mean()
            s.opt.zero_grad()
            loss.backward()
            s.opt.step()
        return loss.item()


results = {}
for fold in range(20):
    t = Trainer()
    t.fit()
    results[fold] = t
