"""Layers are unfrozen one after another under one optimiser with fp32 states; step 12 has 32 times
the batch.

cause: too_large
device: 700 MiB
ends: oom
never: let go of the first
"""

import torch
from torch import nn


class FP32AdamW(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self):
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is None:
                    continue
                s = self.state[p]
                if not s:
                    s["m"] = torch.zeros(p.shape, dtype=torch.float32, device=p.device)
                    s["v"] = torch.zeros(p.shape, dtype=torch.float32, device=p.device)
                s["m"].lerp_(p.grad.float(), 0.1)
                s["v"].mul_(0.9)
                p.add_(s["m"].to(p.dtype), alpha=-g["lr"])


blocks = (
    nn.ModuleList(nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(6)]) for _ in range(3))
    .cuda()
    .bfloat16()
)
for b in blocks[:2]:
    b.requires_grad_(False)
opt = FP32AdamW(blocks.parameters())
for step in range(30):
    if step in (4, 8):
        blocks[1 if step == 4 else 0].requires_grad_(True)
    x = torch.randn(1024 * (32 if step == 12 else 1), 1024, device="cuda", dtype=torch.bfloat16)
    for b in blocks:
        x = b(x)
    x.mean().backward()
    opt.step()
    opt.zero_grad()
