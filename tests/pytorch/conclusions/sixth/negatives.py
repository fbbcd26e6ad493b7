"""A full queue of negatives is small; the batch does not fit.

cause: too_large
device: 1100MiB
ends: oom
"""

import copy
from collections import deque

import torch
import torch.nn as nn

q = nn.Sequential(
    nn.Linear(3072, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 2048)
).cuda()
k = copy.deepcopy(q)
o = torch.optim.SGD(q.parameters(), 0.03, momentum=0.9)
queue = deque(maxlen=16)
for s in range(12):
    x = torch.randn(2048, 3072, device="cuda")
    with torch.no_grad():
        for a, b in zip(k.parameters(), q.parameters()):
            a.lerp_(b, 0.001)
        kk = nn.functional.normalize(k(x), dim=1)
    z = nn.functional.normalize(q(x), dim=1)
    pos = (z * kk).sum(1, keepdim=True)
    neg = z @ torch.cat(list(queue)).T if queue else z[:, :0]
    l = nn.functional.cross_entropy(
        torch.cat([pos, neg], 1) / 0.07, torch.zeros(2048, dtype=torch.long, device="cuda")
    )
    o.zero_grad()
    l.backward()
    o.step()
    queue.append(kk)
    print(s)
