"""The images grow from step to step, as they are meant to.

cause: too_large
device: 1200MiB
ends: oom
never: before were alike
"""

import torch
import torch.nn as nn

m = nn.Sequential(
    nn.Conv2d(3, 64, 3, padding=1),
    nn.BatchNorm2d(64),
    nn.ReLU(),
    nn.Conv2d(64, 64, 3, padding=1),
    nn.BatchNorm2d(64),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(64, 10),
).cuda()
o = torch.optim.SGD(m.parameters(), 0.1, momentum=0.9)
recent = []
for s in range(12):
    r = 32 * (s + 1)
    x = torch.randn(32, 3, r, r, device="cuda")
    l = m(x).mean()
    o.zero_grad()
    l.backward()
    o.step()
    recent = (recent + [l.detach()])[-50:]
