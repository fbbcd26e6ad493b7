"""Contrastive learning with a queue of keys and a second network that follows slowly; the keys of
the latest batches are a list that is put together for each loss."""

import copy

import recorder
import torch
from torch import nn
from torch.nn import functional as F


def conv(a, b):
    return nn.Sequential(nn.Conv2d(a, b, 3, 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU())


query = nn.Sequential(
    conv(3, 48),
    conv(48, 96),
    conv(96, 192),
    conv(192, 384),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(384, 256),
).cuda()
key = copy.deepcopy(query).requires_grad_(False)
optimizer = torch.optim.SGD(query.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)
queue = []
for _ in recorder.steps(70):
    x = recorder.blank(180, 3, 112, 112, dtype=torch.float)
    with torch.no_grad():
        for slow, fast in zip(key.parameters(), query.parameters()):
            slow.mul_(0.999).add_(fast, alpha=0.001)
        k = F.normalize(key(x.flip(3)), dim=1)
    q = F.normalize(query(x), dim=1)
    logits = (q * k).sum(1, keepdim=True)
    if queue:
        logits = torch.cat([logits, q @ torch.cat(queue).t()], 1)
    loss = F.cross_entropy(logits / 0.2, torch.zeros(180, dtype=torch.long, device="cuda"))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    queue = [*queue, k][-40:]
    recorder.step()
