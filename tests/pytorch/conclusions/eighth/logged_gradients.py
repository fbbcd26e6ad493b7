"""A log keeps the gradients of each step.

cause: grows
device: 1 GiB
ends: oom
never: of a loss or a metric
"""

import torch
from torch import nn

m = nn.Sequential(*[x for _ in range(6) for x in (nn.Linear(1024, 1024), nn.GELU())]).cuda()
opt = torch.optim.Adam(m.parameters())
log = []
for step in range(100):
    loss = m(torch.randn(1024, 1024, device="cuda")).square().mean()
    opt.zero_grad()
    loss.backward()
    log.append([p.grad for p in m.parameters()])
    opt.step()
