"""A library of its own (as NCCL or a renderer would) has taken most of the device past torch.

cause: other_process
device: 8 GiB
ends: oom
never: no_grad|inference_mode
"""

import ctypes

import torch
from torch import nn


def layers(width, count):
    return nn.Sequential(*[m for _ in range(count) for m in (nn.Linear(width, width), nn.GELU())])


torch.zeros(1, device="cuda")
taken = ctypes.c_uint64()
driver = ctypes.CDLL("libcuda.so.1")
assert driver.cuMemAlloc_v2(ctypes.byref(taken), ctypes.c_size_t(6 << 30)) == 0
model = layers(2048, 8).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(20):
    model(torch.randn(2048 * (step + 1), 2048, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
