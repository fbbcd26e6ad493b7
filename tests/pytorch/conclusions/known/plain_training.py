"""A plain training whose batch is too large: attention on one line, lengths that vary.

cause: too_large
device: 16 GiB
ends: oom
never: no_grad|inference_mode|retain_graph|\.item\(\)
"""

import os
import random

import torch
from torch import nn

D, L, V, B = 1024, 12, 32000, int(os.environ.get("B", "24"))


class Block(nn.Module):
    def __init__(s):
        super().__init__()
        s.ln1 = nn.LayerNorm(D)
        s.qkv = nn.Linear(D, 3 * D)
        s.proj = nn.Linear(D, D)
        s.ln2 = nn.LayerNorm(D)
        s.up = nn.Linear(D, 4 * D)
        s.down = nn.Linear(4 * D, D)

    def forward(s, x):
        b, t, _ = x.shape
        q, k, v = s.qkv(s.ln1(x)).view(b, t, 3, 16, D // 16).permute(2, 0, 3, 1, 4)
        a = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        x = x + s.proj(a.transpose(1, 2).reshape(b, t, D))
        return x + s.down(nn.functional.gelu(s.up(s.ln2(x))))


class GPT(nn.Module):
    def __init__(s):
        super().__init__()
        s.emb = nn.Embedding(V, D)
        s.layers = nn.ModuleList(Block() for _ in range(L))
        s.ln = nn.LayerNorm(D)
        s.head = nn.Linear(D, V, bias=False)

    def forward(s, i):
        x = s.emb(i)
        for l in s.layers:
            x = l(x)
        return s.head(s.ln(x))


random.seed(0)
m = GPT().cuda()
o = torch.optim.AdamW(m.parameters())
for step in range(40):
    x = torch.zeros(
        B, random.choice([256, 384, 512, 640, 768, 1024]), dtype=torch.long, device="cuda"
    )
    y = m(x)
    nn.functional.cross_entropy(y.view(-1, V), x.view(-1)).backward()
    o.step()
    o.zero_grad()
    del y
print("fits")
