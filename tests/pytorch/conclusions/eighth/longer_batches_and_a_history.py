"""From step 45 on the batch is larger than fits; beside it a history grows by 512 KiB a step.

cause: too_large
device: 1 GiB
ends: oom
never: \.item\(\)
"""

import torch
from torch import nn

m = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for i in range(12)]).cuda()
opt = torch.optim.Adam(m.parameters())
hist = []
for step in range(100):
    n = 64 if step < 45 else 8192
    y = m(torch.randn(n, 2048, device="cuda"))
    loss = y.square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    v = y[:64].detach().clone()
    hist.append(v)
