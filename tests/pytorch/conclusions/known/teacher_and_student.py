"""A teacher without gradients, a student with; the batch is too large.

cause: too_large
device: 4 GiB
ends: oom
never: no_grad|inference_mode|retain_graph|\.item\(\)
"""

import torch
from torch import nn


def layers(width, count):
    return nn.Sequential(*[m for _ in range(count) for m in (nn.Linear(width, width), nn.GELU())])


teacher, student = layers(3072, 10).cuda(), layers(3072, 6).cuda()
optimizer = torch.optim.AdamW(student.parameters())
for step in range(20):
    x = torch.randn(20000, 3072, device="cuda")
    with torch.no_grad():
        wanted = teacher(x)
    (student(x) - wanted).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
