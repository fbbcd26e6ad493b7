"""A GAN in bfloat16, with optimisers of its own that keep fp32 states; step 3 has eight times the
batch.

cause: too_large
device: 600 MiB
ends: oom
never: let go of the first
"""

import torch
from torch import nn


class MasterAdam(torch.optim.Optimizer):
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
                    s["master"] = p.detach().float()
                    s["m"] = torch.zeros_like(p, dtype=torch.float32)
                    s["v"] = torch.zeros_like(p, dtype=torch.float32)
                s["m"].lerp_(p.grad.float(), 0.1)
                s["v"].mul_(0.9)
                s["master"].sub_(s["m"], alpha=g["lr"])
                p.copy_(s["master"])


def net():
    return nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(1024, 1024), nn.ReLU())])


G, D = net().cuda().bfloat16(), net().cuda().bfloat16()
oG, oD = MasterAdam(G.parameters()), MasterAdam(D.parameters())
for step in range(20):
    z = torch.randn(2048 * (8 if step == 3 else 1), 1024, device="cuda", dtype=torch.bfloat16)
    oD.zero_grad()
    d = D(G(z).detach()).mean()
    d.backward()
    oD.step()
    oG.zero_grad()
    g = D(G(z)).mean()
    g.backward()
    oG.step()
