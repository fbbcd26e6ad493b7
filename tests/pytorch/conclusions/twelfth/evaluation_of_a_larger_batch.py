"""After some steps the model is evaluated, by batches of four times the size and with gradients.

cause: no_grad
also: too_large
device: 900 MiB
ends: oom
never: recompute activations|a checkpoint
"""

import torch
from torch import nn

model = nn.Sequential(*[m for _ in range(12) for m in (nn.Linear(1024, 1024), nn.GELU())]).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def evaluate():
    model.eval()
    right = 0
    for _ in range(4):
        out = model(torch.randn(16384, 1024, device="cuda"))
        right += (out.argmax(1) == 0).sum().item()
    model.train()
    return right


for epoch in range(2):
    for _ in range(6):
        model(torch.randn(4096, 1024, device="cuda")).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    evaluate()
