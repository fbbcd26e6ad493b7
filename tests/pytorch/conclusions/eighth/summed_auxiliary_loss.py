"""An auxiliary loss that is only logged is summed with its graph.

cause: graph
also: hooks
device: 1 GiB
ends: oom
"""

import torch
from torch import nn

enc = nn.Sequential(*[x for _ in range(4) for x in (nn.Linear(1024, 1024), nn.GELU())]).cuda()
aux_head = nn.Sequential(nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1)).cuda()
opt = torch.optim.Adam([*enc.parameters(), *aux_head.parameters()])
total_aux = 0
for step in range(200):
    x = torch.randn(1024, 1024, device="cuda")
    z = enc(x)
    loss = z.square().mean()
    aux = aux_head(z).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    total_aux = total_aux + aux
