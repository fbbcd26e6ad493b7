"""A batch is halved until it fits, and the exceptions are kept.

cause: too_large
device: 4GiB
ends: oom
never: To do: a smaller batch
"""

import torch
import torch.nn as nn

model = nn.Sequential(*[nn.Sequential(nn.Linear(2048, 2048), nn.ReLU()) for _ in range(24)]).cuda()
opt = torch.optim.SGD(model.parameters(), 0.1)
errors = []


def train(bs):
    x = torch.randn(bs, 2048, device="cuda")
    h = model(x)
    h.mean().backward()
    opt.step()
    opt.zero_grad()


bs = 65536
while bs >= 64:
    try:
        train(bs)
        print("ok", bs)
        break
    except torch.OutOfMemoryError as e:
        errors.append(e)
        last = e
        bs //= 2
else:
    raise last
