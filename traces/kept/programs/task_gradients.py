"""Multi-task learning: the gradient of each task is kept flat, conflicts are projected away, and a
history of the last gradients of all tasks is kept for their likeness."""

import collections

import recorder
import torch
from torch import nn

TASKS = 7
trunk = nn.Sequential(
    nn.Linear(2050, 2300), nn.GELU(), nn.Linear(2300, 2300), nn.GELU(), nn.Linear(2300, 640)
).cuda()
heads = nn.ModuleList(
    [nn.Linear(640, recorder.draw.randrange(3, 200)) for _ in range(TASKS)]
).cuda()
optimizer = torch.optim.SGD([*trunk.parameters(), *heads.parameters()], lr=1e-2)
history = collections.deque(maxlen=56)
for _ in recorder.steps(34):
    flat = []
    for head in heads:
        loss = (
            head(trunk(recorder.blank(recorder.draw.randrange(100, 500), 2050, dtype=torch.float)))
            .square()
            .mean()
        )
        slopes = torch.autograd.grad(loss, [*trunk.parameters()])
        flat.append(torch.cat([s.flatten() for s in slopes]))
    mended = []
    for one in flat:
        g = one.clone()
        for other in recorder.draw.sample(flat, 3):
            g = g - (g @ other).clamp(max=0) / (other @ other + 1e-9) * other
        mended.append(g)
    total = sum(mended) / TASKS
    at = 0
    for p in trunk.parameters():
        p.grad = total[at : at + p.numel()].view_as(p).clone()
        at += p.numel()
    optimizer.step()
    history.extend(f.half() for f in flat)
    recorder.step()
