"""All predictions of the last evaluation are collected on the GPU.

cause: collects
also: grows
device: 1500MiB
ends: oom
"""

import torch
import torch.nn as nn

m = (
    nn.Sequential(
        *[nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(6)]
    )
    .cuda()
    .bfloat16()
)
o = torch.optim.AdamW(m.parameters())
acc = torch.zeros(1000, device="cuda")
logs = []
for s in range(8):
    l = m(torch.randn(2048, 1024, device="cuda", dtype=torch.bfloat16)).float().pow(2).mean()
    o.zero_grad()
    l.backward()
    o.step()
    acc[s] = l.detach()
    logs.append(l.detach())
print("train done")
torch.cuda.empty_cache()
with torch.no_grad():
    out = torch.cat(  # the cause
        [
            m(torch.randn(2048, 1024, device="cuda", dtype=torch.bfloat16)).float()  # the cause
            for _ in range(400)
        ]
    )  # the cause
