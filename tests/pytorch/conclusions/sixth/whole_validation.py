"""The validation is one batch, with gradients off.

cause: too_large
device: 640MiB
ends: oom
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Net(nn.Module):
    def __init__(s):
        super().__init__()
        s.layers = nn.ModuleList([nn.Linear(1024, 1024) for _ in range(8)])
        s.head = nn.Linear(1024, 100)

    def forward(s, x):
        for l in s.layers:
            x = F.relu(l(x))
        return s.head(x)


net = Net().cuda()
opt = torch.optim.Adam(net.parameters(), 1e-3)
xs = torch.randn(100000, 1024)
ys = torch.randint(0, 100, (100000,))
for ep in range(3):
    net.train()
    for i in range(4):
        j = torch.randint(0, 90000, (256,))
        x, y = xs[j].cuda(), ys[j].cuda()
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()
    net.eval()
    with torch.no_grad():
        out = net(xs[:50000].cuda())
        print("acc", (out.argmax(1) == ys[:50000].cuda()).float().mean().item())
