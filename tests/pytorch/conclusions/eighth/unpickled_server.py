"""A model that was saved whole is loaded to the GPU, which it nearly fills.

cause: too_large
device: 1 GiB
ends: oom
never: drop a checkpoint
"""

import io

import torch
from torch import nn

m = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for i in range(50)])
b = io.BytesIO()
torch.save(m, b)
b.seek(0)
m = torch.load(b, map_location="cuda", weights_only=False)
with torch.no_grad():
    for n in (64, 128, 256):
        m(torch.randn(n * 64, 2048, device="cuda")).sum().item()
