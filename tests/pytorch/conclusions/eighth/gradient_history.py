"""An optimiser averages the last 20 gradients of each weight.

cause: grows
also: too_large
device: 1 GiB
ends: oom
never: let go of the first
"""

import collections

import torch
from torch import nn


class AvgGrad(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, k=20):
        super().__init__(params, dict(lr=lr, k=k))

    @torch.no_grad()
    def step(self):
        for g in self.param_groups:
            for p in g["params"]:
                s = self.state[p]
                if not s:
                    s["h"] = collections.deque(maxlen=g["k"])
                s["h"].append(p.grad.clone())
                p.add_(sum(s["h"]), alpha=-g["lr"] / len(s["h"]))


m = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(4)]).cuda()  # 64 MiB
opt = AvgGrad(m.parameters(), k=20)
for step in range(40):
    m(torch.randn(64, 2048, device="cuda")).mean().backward()
    opt.step()
    opt.zero_grad()
