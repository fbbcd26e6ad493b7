"""After a warm-up the program makes a second optimizer and keeps the first.

cause: optimizer_twice
device: 8 GiB
ends: killed
"""

import os
import signal

import torch
from torch import nn


def layers(width, count):
    return nn.Sequential(*[m for _ in range(count) for m in (nn.Linear(width, width), nn.GELU())])


model = layers(2048, 12).cuda()
optimizers = []
for phase in range(2):
    optimizers.append(torch.optim.AdamW(model.parameters()))
    for step in range(5):
        model(torch.randn(256, 2048, device="cuda")).square().mean().backward()
        optimizers[-1].step()
        optimizers[-1].zero_grad()
os.kill(os.getpid(), signal.SIGKILL)
