"""A small decoder trained by Muon: Newton-Schulz on the matrices' momenta, AdamW for all else."""

import recorder
import torch
import torch.nn.functional as F
from torch import nn

VOCAB, DIM, HEADS = 16384, 512, 8


def newton_schulz(g, steps=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.bfloat16()
    flip = g.size(-2) > g.size(-1)
    if flip:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        m = x @ x.mT
        x = a * x + (b * m + c * m @ m) @ x
    return x.mT if flip else x


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95):
        super().__init__(params, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["buffer"] = torch.zeros_like(p.grad)
                buffer = state["buffer"]
                buffer.lerp_(p.grad, 1 - group["momentum"])
                update = newton_schulz(p.grad.lerp(buffer, group["momentum"]))
                scale = max(1, p.size(-2) / p.size(-1)) ** 0.5
                p.add_(update.to(p.dtype), alpha=-group["lr"] * scale)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))
        self.up, self.down = (
            nn.Linear(DIM, 4 * DIM, bias=False),
            nn.Linear(4 * DIM, DIM, bias=False),
        )
        self.mix = nn.Parameter(torch.ones(2))

    def forward(self, x, first):
        x = self.mix[0] * x + self.mix[1] * first
        y = F.rms_norm(x, (DIM,))
        b, t, _ = y.shape
        q, k, v = (f(y).view(b, t, HEADS, -1) for f in (self.q, self.k, self.v))
        q, k = F.rms_norm(q, (q.size(-1),)), F.rms_norm(k, (k.size(-1),))
        y = F.scaled_dot_product_attention(*(z.transpose(1, 2) for z in (q, k, v)), is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, t, DIM))
        return x + self.down(F.relu(self.up(F.rms_norm(x, (DIM,)))).square())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, tokens):
        x = first = F.rms_norm(self.embed(tokens), (DIM,))
        for block in self.blocks:
            x = block(x, first)
        return 15 * torch.tanh(self.head(F.rms_norm(x, (DIM,))) / 15)


model = Model().cuda()
matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
rest = [p for p in model.parameters() if not any(p is m for m in matrices)]
optimizers = [Muon(matrices), torch.optim.AdamW(rest, lr=3e-3, betas=(0.8, 0.95), fused=True)]

for step in recorder.steps(15):
    length = (128, 256, 512)[min(2, step // 5)]
    tokens = torch.randint(VOCAB, (2, length + 1)).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad(set_to_none=True)
    recorder.step()
