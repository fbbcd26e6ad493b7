"""Weights, gradients and states do not fit.

cause: too_large
device: 6GiB
ends: oom
"""

import torch
import torch.nn as nn

with torch.device("cuda"):
    model = nn.Sequential(*[nn.Linear(8192, 8192) for _ in range(8)])
opt = torch.optim.Adam(model.parameters(), lr=1e-4)
for step in range(100):
    x = torch.randn(8, 8192, device="cuda")
    loss = model(x).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"step {step} loss {loss.item():.4f}")
