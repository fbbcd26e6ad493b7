"""A GPT of a billion parameters with activation checkpointing: Adam's states do not fit.

cause: too_large
device: 14 GiB
ends: oom
never: no_grad|inference_mode|detach|checkpointing|leak
"""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


class Config:
    layers = 20
    heads = 16
    width = 2048
    vocab = 50304
    context = 512
    accumulate = 4


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.h = c.heads
        self.ln_1 = nn.LayerNorm(c.width)
        self.attn = nn.Linear(c.width, 3 * c.width)
        self.proj = nn.Linear(c.width, c.width)
        self.ln_2 = nn.LayerNorm(c.width)
        self.fc = nn.Linear(c.width, 4 * c.width)
        self.out = nn.Linear(4 * c.width, c.width)

    def forward(self, x):
        B, T, C = x.shape
        heads = self.attn(self.ln_1(x)).view(B, T, 3, self.h, -1).permute(2, 0, 3, 1, 4)
        q, k, v = heads.unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.out(F.gelu(self.fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte = nn.Embedding(c.vocab, c.width)
        self.wpe = nn.Embedding(c.context, c.width)
        self.h = nn.ModuleList([Block(c) for _ in range(c.layers)])
        self.ln_f = nn.LayerNorm(c.width)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe.weight[: idx.size(1)]
        for block in self.h:
            x = checkpoint(block, x, use_reentrant=False)
        logits = self.ln_f(x) @ self.wte.weight.t()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


with torch.device("cuda"):
    model = GPT(Config)
print(sum(p.numel() for p in model.parameters()) / 1e6, "M parameters", flush=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95))
for it in range(10):
    for micro in range(Config.accumulate):
        x = torch.randint(Config.vocab, (2, Config.context), device="cuda")
        loss = model(x, x.roll(-1, 1)) / Config.accumulate
        loss.backward()
        print(it, micro, flush=True)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
