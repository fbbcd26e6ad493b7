"""The last sample is much longer than the others.

cause: too_large
also: one_tensor
device: 3GiB
ends: oom
"""

import random

import torch
import torch.nn as nn

random.seed(0)
m = nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True), 4).cuda()
o = torch.optim.AdamW(m.parameters())
lens = [128, 200, 150, 180, 140, 190, 160, 4000]
for s, T in enumerate(lens):
    x = torch.randn(16, T, 512, device="cuda")
    l = m(x).mean()
    o.zero_grad()
    l.backward()
    o.step()
