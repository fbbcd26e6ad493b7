"""No training at all: a service keeps embeddings with their graphs.

cause: no_grad
device: 4 GiB
ends: oom
"""

import torch
from torch import nn


def layers(width, count):
    return nn.Sequential(*[m for _ in range(count) for m in (nn.Linear(width, width), nn.GELU())])


model = layers(1024, 8).cuda().eval()
index = []
for request in range(200):
    embedding = model(torch.randn(4096, 1024, device="cuda"))  # the cause
    index.append(embedding.mean(0))
