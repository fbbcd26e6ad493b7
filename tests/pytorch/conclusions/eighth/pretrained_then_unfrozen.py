"""A backbone is unfrozen in step 30, whose gradients and states do not fit; outputs of past steps
are kept too, a few.

cause: too_large
device: 1 GiB
ends: oom
never: \.item\(\)
"""

import torch
from torch import nn

back = (
    nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for i in range(18)])
    .cuda()
    .requires_grad_(False)
)  # 288
head = nn.Linear(2048, 512).cuda()
opt = torch.optim.Adam([*back.parameters(), *head.parameters()])
hist = []
for step in range(100):
    if step == 30:
        back.requires_grad_(True)
    y = head(back(torch.randn(400, 2048, device="cuda")))
    loss = y.square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    hist.append(y.detach())
