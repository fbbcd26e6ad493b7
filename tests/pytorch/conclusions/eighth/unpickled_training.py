"""A model that was saved whole is fine-tuned: weights, gradients and states do not fit.

cause: too_large
device: 1 GiB
ends: oom
never: drop a checkpoint
"""

import io

import torch
from torch import nn

m = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for i in range(17)])
b = io.BytesIO()
torch.save(m, b)
b.seek(0)
model = torch.load(b, map_location="cuda", weights_only=False)
opt = torch.optim.Adam(model.parameters(), foreach=False)
for step in range(5):
    out = model(torch.randn(64, 2048, device="cuda"))
    loss = out.mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
