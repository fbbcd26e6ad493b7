"""Batches are handed to a side stream that falls behind.

cause: streams
device: 8 GiB
ends: killed
never: no_grad|inference_mode
"""

import os
import signal

import torch
from torch import nn


def layers(width, count):
    return nn.Sequential(*[m for _ in range(count) for m in (nn.Linear(width, width), nn.GELU())])


model = layers(1024, 2).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
side = torch.cuda.Stream()


def prefetch(count):
    for _ in range(count):
        batch = torch.randn(8192, 1024, device="cuda")  # the cause
        with torch.cuda.stream(side):
            torch.cuda._sleep(1 << 40)
            batch.mul_(2)
        batch.record_stream(side)


for step in range(4):
    model(torch.randn(64, 1024, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
prefetch(40)
os.kill(os.getpid(), signal.SIGKILL)
