"""A model returns all its hidden states; the batch of the evaluation is too large.

cause: too_large
device: 1 GiB
ends: oom
never: collected
"""

import torch
from torch import nn


class T(nn.Module):
    def __init__(s):
        super().__init__()
        s.ls = nn.ModuleList(nn.Linear(512, 512) for _ in range(24))

    def forward(s, x):
        hs = [x]
        for layer in s.ls:
            x = torch.tanh(layer(x))
            hs.append(x)
        return x, hs


m = T().cuda()
opt = torch.optim.Adam(m.parameters())


def step(n):
    out, _ = m(torch.randn(n, 512, device="cuda"))
    loss = out.square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()


for i in range(6):
    step(512)
with torch.no_grad():
    for i in range(3):
        out, hs = m(torch.randn(26000, 512, device="cuda"))
