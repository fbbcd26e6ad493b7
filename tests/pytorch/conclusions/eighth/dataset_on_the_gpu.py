"""The whole dataset lies on the GPU.

cause: one_tensor
device: 1700 MiB
ends: oom
never: shorter inputs
"""

import torch
from torch import nn

X = torch.randn(150, 3, 840, 840)
X = X.cuda()
m = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(16, 16, 3, padding=1),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(16, 10),
).cuda()
opt = torch.optim.Adam(m.parameters())
for epoch in range(2):
    for i in range(0, 32, 4):
        loss = m(X[i : i + 4].cuda()).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
