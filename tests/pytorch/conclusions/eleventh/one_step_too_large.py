"""One step got too large a batch, was refused, and its error was caught: the others are small.

cause: too_large
also:  one_tensor
device: 1 GiB
ends: killed
never: that one tensor
"""

import gc
import os
import signal

import torch
from torch import nn

net = nn.Sequential(*[nn.Linear(512, 512) for _ in range(24)]).cuda()
optimizer = torch.optim.Adam(net.parameters())


def step(size):
    net(torch.randn(size, 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


for size in (512, 512, 512, 60000, 512, 512):
    try:
        step(size)
    except torch.OutOfMemoryError:
        pass
    gc.collect()
del net, optimizer
gc.collect()
os.kill(os.getpid(), signal.SIGKILL)
