"""Progressive resizing doubles the resolution at step 60; a history of confusion matrices grows by
0.4 MiB a step.

cause: too_large
device: 620 MiB
ends: oom
never: \.item\(\)
"""

import torch
from torch import nn

m = nn.Sequential(
    *[x for _ in range(6) for x in (nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())]
).cuda()
opt = torch.optim.Adam(m.parameters())
conf = []
for step in range(120):
    r = 128 if step < 60 else 256
    y = m(torch.randn(16, 16, r, r, device="cuda"))
    loss = y.square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    c = torch.zeros(330, 330, device="cuda")
    conf.append(c)
