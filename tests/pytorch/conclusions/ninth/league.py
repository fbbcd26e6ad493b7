"""Self-play: a copy of the policy joins the league after each generation, and none leaves.

cause: grows
device: 1 GiB
ends: oom
never: (gradients|states) and|with their|of a loss or a metric
"""

import copy
import random

import torch
from torch import nn


def block():
    return nn.Sequential(nn.Linear(1024, 1024), nn.ReLU())


policy = nn.Sequential(*[block() for _ in range(4)], nn.Linear(1024, 64)).cuda()
optimizer = torch.optim.Adam(policy.parameters())
league = [copy.deepcopy(policy)]
for generation in range(200):
    for _ in range(6):
        opponent = random.choice(league)
        seen = torch.randn(256, 1024, device="cuda")
        with torch.no_grad():
            answer = opponent(seen).argmax(1)
        loss = nn.functional.cross_entropy(policy(seen), answer)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    league.append(copy.deepcopy(policy).requires_grad_(False))  # the cause
