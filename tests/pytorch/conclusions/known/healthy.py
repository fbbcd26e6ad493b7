"""A training to which nothing is wrong.

cause: nothing
device: 8 GiB
ends: killed
never: no_grad|inference_mode|retain_graph|\.item\(\)
"""

import os
import signal

import torch
from torch import nn


def layers(width, count):
    return nn.Sequential(*[m for _ in range(count) for m in (nn.Linear(width, width), nn.GELU())])


model = layers(1024, 8).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(30):
    model(torch.randn(1024, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
os.kill(os.getpid(), signal.SIGKILL)
