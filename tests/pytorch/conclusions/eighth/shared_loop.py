"""Training and evaluation share a loop, which runs the evaluation with gradients.

cause: no_grad
device: 2 GiB
ends: oom
"""

import torch
from torch import nn

m = nn.Sequential(*[x for _ in range(6) for x in (nn.Linear(1024, 1024), nn.GELU())]).cuda()
opt = torch.optim.Adam(m.parameters())


def run_epoch(n, train):
    outs = []
    for i in range(n):
        x = torch.randn(1024, 1024, device="cuda")
        y = m(x)
        loss = y.square().mean()
        if train:
            opt.zero_grad()
            loss.backward()
            opt.step()
            outs.append(loss.item())
        else:
            outs.append(loss)
    return sum(outs) / n


for epoch in range(3):
    run_epoch(20, True)
    run_epoch(60, False)
