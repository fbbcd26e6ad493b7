"""All blocks are checkpointed; the logits and the loss do not fit.

cause: too_large
device: 4GiB
ends: oom
never: checkpointing \(torch
"""

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint


class Blk(nn.Module):
    def __init__(s, d):
        super().__init__()
        s.n = nn.LayerNorm(d)
        s.a = nn.MultiheadAttention(d, 8, batch_first=True)
        s.f = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(s, x):
        y = s.n(x)
        x = x + s.a(y, y, y, need_weights=True)[0]
        return x + s.f(x)


class M(nn.Module):
    def __init__(s):
        super().__init__()
        s.e = nn.Embedding(50000, 512)
        s.b = nn.ModuleList(Blk(512) for _ in range(6))
        s.h = nn.Linear(512, 50000)

    def forward(s, i):
        x = s.e(i)
        for b in s.b:
            x = checkpoint(b, x, use_reentrant=False)
        return s.h(x)


m = M().cuda()
opt = torch.optim.AdamW(m.parameters())
sc = torch.amp.GradScaler("cuda")
for step in range(20):
    i = torch.randint(0, 50000, (8, 1024), device="cuda")
    with torch.autocast("cuda", dtype=torch.float16):
        lg = m(i)
        loss = nn.functional.cross_entropy(lg.view(-1, 50000), i.view(-1))
    sc.scale(loss).backward()
    sc.step(opt)
    sc.update()
    opt.zero_grad()
    print(step)
