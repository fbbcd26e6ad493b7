"""A rollout keeps the keys of all its layers, which it needs; its batch in step 5 is too large.

cause: too_large
also: collects
device: 1 GiB
ends: oom
"""

import torch
from torch import nn

m = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]).cuda()
opt = torch.optim.Adam(m.parameters())


@torch.no_grad()
def rollout(b, T=64, L=24):
    ks = [torch.zeros(b, 0, 512, device="cuda") for _ in range(L)]
    for t in range(T):
        x = torch.randn(b, 1, 512, device="cuda")
        ks = [torch.cat([k, x], 1) for k in ks]
        x = m(sum(k.mean(1) for k in ks))
    return x


for step in range(10):
    x = rollout(200 if step == 5 else 8)
    loss = m(x).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
