"""The second stage of a training, contrastive with four views, is too large: it runs out in the
loss of its first step.

cause: too_large
device: 800 MiB
ends: oom
never: To do: run it in torch.no_grad
"""

import torch
from torch import nn

m = nn.Sequential(*[x for _ in range(6) for x in (nn.Linear(1024, 1024), nn.GELU())]).cuda()
opt = torch.optim.Adam(m.parameters())


def pretrain(n):
    for i in range(n):
        x = torch.randn(256, 1024, device="cuda")
        loss = (m(x) - x).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()


def contrastive(n, b):
    for i in range(n):
        views = [torch.randn(b, 1024, device="cuda") for _ in range(4)]
        z = [nn.functional.normalize(m(v)) for v in views]
        loss = sum(
            nn.functional.cross_entropy(z[0] @ k.T, torch.arange(b, device="cuda")) for k in z[1:]
        )
        opt.zero_grad()
        loss.backward()
        opt.step()


pretrain(5)
contrastive(5, 3072)
