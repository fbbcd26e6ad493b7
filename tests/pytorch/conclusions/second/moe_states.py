"""A mixture of experts whose weights and gradients fit, and whose states of Adam do not.

cause: too_large
device: 16 GiB
ends: oom
never: no_grad|inference_mode|detach|smaller batch|batch size|sequence length|shorter
"""

import torch
from torch import nn


class Expert(nn.Module):
    def __init__(self, d, f):
        super().__init__()
        self.w1, self.w2, self.w3 = (nn.Linear(*s, bias=False) for s in ((d, f), (f, d), (d, f)))

    def forward(self, x):
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class ExpertChoice(nn.Module):
    """Each expert chooses the tokens that it works on."""

    def __init__(self, d=2048, f=5504, experts=16):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.gate = nn.Linear(d, experts, bias=False)
        self.experts = nn.ModuleList(Expert(d, f) for _ in range(experts))

    def forward(self, x):
        h = self.norm(x)
        affinity = self.gate(h).softmax(dim=-1)
        weight, index = affinity.topk(2 * len(x) // len(self.experts), dim=0)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            out = out.index_add(0, index[:, e], weight[:, e, None] * expert(h[index[:, e]]))
        return x + out


ACCUMULATE = 4
with torch.device("cuda"):
    model = nn.Sequential(ExpertChoice(), ExpertChoice(), nn.LayerNorm(2048))
print(sum(p.numel() for p in model.parameters()) / 1e9, "billion parameters")
opt = torch.optim.AdamW(model.parameters(), lr=3e-4)

for step in range(100):
    total = 0.0
    for micro in range(ACCUMULATE):
        x, target = torch.randn(2, 1024, 2048, device="cuda")
        loss = nn.functional.mse_loss(model(x), target) / ACCUMULATE
        loss.backward()
        total += loss.item()
        print("step", step, "micro-batch", micro, flush=True)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    opt.zero_grad(set_to_none=True)
    print("step", step, "done, loss", total, flush=True)
