"""A teacher's forward has gradients on, though nothing trains it.

cause: no_grad
device: 1900MiB
ends: oom
"""

import torch
import torch.nn as nn

mk = lambda n: nn.Sequential(
    *[nn.Sequential(nn.Linear(2048, 2048), nn.GELU()) for _ in range(n)]
).cuda()
teacher, student = mk(16), mk(4)
teacher.eval()
o = torch.optim.AdamW(student.parameters())
for s in range(6):
    x = torch.randn(4096 * (1 if s < 3 else 2), 2048, device="cuda")
    zs = student(x)
    zt = teacher(x)  # the cause
    l = (zs - zt.detach()).pow(2).mean() + 0 * zt.mean().detach()
    o.zero_grad()
    l.backward()
    o.step()
