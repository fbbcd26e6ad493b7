"""Inference in one forward, with gradients on.

cause: no_grad
also: too_large
device: 2 GiB
ends: oom
"""

import torch
from torch import nn

m = nn.Sequential(*[x for _ in range(40) for x in (nn.Linear(1024, 1024), nn.GELU())]).cuda().eval()
x = torch.randn(8192, 1024, device="cuda")
y = m(x)
