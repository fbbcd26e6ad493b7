"""A replay buffer fills up.

cause: grows
device: 1GiB
ends: oom
"""

import random
from collections import deque

import torch
import torch.nn as nn

buf = deque(maxlen=100_000)
q = nn.Sequential(
    nn.Conv2d(4, 32, 8, 4),
    nn.ReLU(),
    nn.Conv2d(32, 64, 4, 2),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(64 * 9 * 9, 512),
    nn.ReLU(),
    nn.Linear(512, 6),
).cuda()
import copy

tgt = copy.deepcopy(q)
opt = torch.optim.Adam(q.parameters(), 1e-4)


def step_env(a):
    return torch.rand(4, 84, 84, device="cuda"), torch.rand((), device="cuda")  # the cause


s = torch.rand(4, 84, 84, device="cuda")
for t in range(100_000):
    with torch.no_grad():
        a = q(s[None]).argmax(1)
    s2, r = step_env(a)
    buf.append((s, a, r, s2))  # the cause
    s = s2
    if len(buf) > 500 and t % 50 == 0:
        b = random.sample(buf, 64)
        S = torch.stack([x[0] for x in b])
        S2 = torch.stack([x[3] for x in b])
        A = torch.cat([x[1] for x in b])
        R = torch.stack([x[2] for x in b])
        with torch.no_grad():
            y = R + 0.99 * tgt(S2).max(1).values
        loss = nn.functional.smooth_l1_loss(q(S).gather(1, A[:, None] % 6)[:, 0], y)
        opt.zero_grad()
        loss.backward()
        opt.step()
print("done", t)
