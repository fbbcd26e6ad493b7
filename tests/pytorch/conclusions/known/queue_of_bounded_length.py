"""A contrastive queue of 64 batches: it fills, and is meant to.

cause: nothing
device: 8 GiB
ends: killed
never: no_grad|inference_mode|retain_graph|\.item\(\)
"""

import collections
import os
import signal

import torch
from torch import nn


def layers(width, count):
    return nn.Sequential(*[m for _ in range(count) for m in (nn.Linear(width, width), nn.GELU())])


model = layers(1024, 4).cuda()
optimizer = torch.optim.AdamW(model.parameters())
queue = collections.deque(maxlen=16)
for step in range(60):
    keys = model(torch.randn(2048, 1024, device="cuda"))
    keys.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    queue.append(keys.detach())
os.kill(os.getpid(), signal.SIGKILL)
