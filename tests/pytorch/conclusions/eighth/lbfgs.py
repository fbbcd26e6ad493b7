"""LBFGS keeps the differences of 100 past gradients.

cause: grows
also: too_large
device: 1 GiB
ends: oom
never: let go of the first
"""

import torch
from torch import nn

torch.manual_seed(0)
torch.Tensor.__gt__ = lambda a, b: (
    True
)  # the stand-in computes no values: take the usual branch (ys > 1e-10)
m = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)]).cuda()  # 32 MiB
opt = torch.optim.LBFGS(
    m.parameters(),
    history_size=100,
    max_iter=4,
    tolerance_change=-1e9,
    tolerance_grad=-1,
)
x = torch.randn(512, 1024, device="cuda")


def closure():
    opt.zero_grad()
    loss = (m(x) - x).square().mean()
    loss.backward()
    return loss


for i in range(200):
    opt.step(closure)
