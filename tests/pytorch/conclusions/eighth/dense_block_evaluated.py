"""A dense block keeps the features of all its layers until its forward returns; the batch of the
evaluation is too large.

cause: too_large
device: 2 GiB
ends: oom
never: collected
"""

import torch
import torch.nn.functional as F
from torch import nn


class Dense(nn.Module):
    def __init__(s):
        super().__init__()
        s.w = nn.ParameterList(nn.Parameter(torch.randn(16, 16 * (i + 1), 3, 3)) for i in range(12))

    def forward(s, x):
        feats = [x]
        for w in s.w:
            feats.append(F.relu(F.conv2d(torch.cat(feats, 1), w, padding=1)))
        return torch.cat(feats, 1).mean()


m = Dense().cuda()
opt = torch.optim.Adam(m.parameters())


def train(n):
    for i in range(n):
        loss = m(torch.randn(1, 16, 128, 128, device="cuda"))
        opt.zero_grad()
        loss.backward()
        opt.step()


train(5)
with torch.no_grad():
    for i in range(3):
        m(torch.randn(90, 16, 128, 128, device="cuda")).item()
