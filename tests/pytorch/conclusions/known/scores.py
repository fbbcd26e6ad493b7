"""Attention of one very long sequence builds its whole matrix.

cause: one_tensor
device: 8 GiB
ends: oom
never: no_grad|inference_mode
"""

import torch
from torch import nn

project = nn.Linear(256, 256).cuda()
optimizer = torch.optim.SGD(project.parameters(), lr=0.1)
for length in (1024, 2048, 60000):
    x = project(torch.randn(1, length, 256, device="cuda"))
    scores = x @ x.transpose(1, 2)  # the cause
    scores.softmax(-1).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
