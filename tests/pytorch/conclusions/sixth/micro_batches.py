"""A larger micro batch beside a teacher does not fit.

cause: too_large
device: 2500MiB
ends: oom
"""

import torch
import torch.nn as nn

T = (
    nn.Sequential(*[nn.Sequential(nn.Linear(2048, 2048), nn.GELU()) for _ in range(12)])
    .cuda()
    .requires_grad_(False)
)
S = nn.Sequential(*[nn.Sequential(nn.Linear(2048, 2048), nn.GELU()) for _ in range(12)]).cuda()
o = torch.optim.AdamW(S.parameters())
for s in range(6):
    o.zero_grad()
    for k in range(4):
        x = torch.randn(4096 if s < 2 else 8192, 2048, device="cuda")
        with torch.no_grad():
            t = T(x)
        l = nn.functional.mse_loss(S(x), t) / 4
        l.backward()
    o.step()
