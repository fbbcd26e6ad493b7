"""Step 12 has nine times the batch; the optimiser was made again once, and the first one kept: 8%.

cause: too_large
device: 800 MiB
ends: oom
never: let go of the first
"""

import torch
from torch import nn

m = nn.Sequential(*[x for _ in range(8) for x in (nn.Linear(1024, 1024), nn.GELU())]).cuda()
o = torch.optim.Adam(m.parameters())
old = None
for step in range(20):
    if step == 6:
        old = o
        o = torch.optim.Adam(m.parameters())
    loss = m(torch.randn(9000 if step == 12 else 1000, 1024, device="cuda")).square().mean()
    o.zero_grad()
    loss.backward()
    o.step()
