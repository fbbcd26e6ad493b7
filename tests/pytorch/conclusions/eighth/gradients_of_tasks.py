"""The gradients of twelve tasks are kept until they are averaged.

cause: too_large
device: 1 GiB
ends: oom
never: smaller batch
"""

import torch
from torch import nn

m = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for i in range(6)]).cuda()  # 96
opt = torch.optim.SGD(m.parameters(), 1e-3)
for step in range(5):
    gs = []
    h = m(torch.randn(64, 2048, device="cuda"))
    for t in range(12):
        gs.append(torch.autograd.grad(h[:, t].mean(), list(m.parameters()), retain_graph=True))
    for p, *g in zip(m.parameters(), *gs):
        p.grad = torch.stack(g).mean(0)
    opt.step()
