"""Experts get their first gradients, and so their states, in different steps; step 9 has 88 times
the batch.

cause: too_large
device: 1 GiB
ends: oom
never: let go of the first
"""

import time

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
                    s["m"] = torch.zeros_like(p, dtype=torch.float32)
                    s["v"] = torch.zeros_like(p, dtype=torch.float32)
                s["m"].lerp_(p.grad.float(), 0.1)
                s["v"].mul_(0.9)
                p.add_(s["m"].to(p.dtype), alpha=-g["lr"])


ex = nn.ModuleList(nn.Linear(2048, 2048, bias=False) for _ in range(8)).cuda().bfloat16()
opt = FP32AdamW(ex.parameters())
for step in range(30):
    x = torch.randn(45000 if step == 9 else 512, 2048, device="cuda", dtype=torch.bfloat16)
    e = ex[min(step, 7)]
    e(x).square().mean().backward()
    opt.step()
    opt.zero_grad()
    # As long as a step takes.
    time.sleep(0.01)
