"""A training resumes from a checkpoint that was loaded onto the host.

cause: too_large
device: 650MiB
ends: oom
never: map_location
"""

import io

import torch
from torch import nn


def network():
    return nn.Sequential(*(nn.Sequential(nn.Linear(2048, 2048), nn.GELU()) for _ in range(8)))


def saved():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    return file


checkpoint = torch.load(saved(), map_location="cpu")
model = network().cuda()
model.load_state_dict(checkpoint["model"])
optimizer = torch.optim.AdamW(model.parameters())
optimizer.load_state_dict(checkpoint["optimizer"])
for step in range(20):
    loss = model(torch.randn(3072, 2048, device="cuda")).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
