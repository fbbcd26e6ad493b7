"""A GPT-2-like language model over documents of varied lengths, four micro-batches a step, fused
AdamW."""

import math
import random

import recorder
import torch
import torch.nn.functional as F
from torch import nn

rng = random.Random(20)
VOCAB, WIDTH, HEADS, LAYERS = 32000, 768, 12, 12


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.fc = nn.Linear(WIDTH, 4 * WIDTH)
        self.out = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.ln_1(x)).split(WIDTH, dim=2)
        q, k, v = (z.view(b, t, HEADS, c // HEADS).transpose(1, 2) for z in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.out(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(1024, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1), ignore_index=-1)


with torch.device("cuda"):
    model = GPT()
decay = [p for p in model.parameters() if p.dim() >= 2]
plain = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW(
    [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
    lr=6e-4,
    betas=(0.9, 0.95),
    fused=True,
)


def batch():
    longest = min(1024, max(64, int(rng.lognormvariate(5.9, 0.6))))
    longest = math.ceil(longest / 8) * 8
    rows = max(1, 4096 // longest)
    tokens = torch.zeros(rows, longest + 1, dtype=torch.long).pin_memory()
    tokens = tokens.to("cuda", non_blocking=True)
    return tokens[:, :-1], tokens[:, 1:].contiguous()


for it in recorder.steps(8):
    total = torch.zeros((), device="cuda")
    for micro in range(4):
        x, y = batch()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(x, y) / 4
        loss.backward()
        total += loss.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = 6e-4 * min(1.0, (it + 1) / 4)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(f"step {it} loss {total.item():.3f}")
    recorder.step()
