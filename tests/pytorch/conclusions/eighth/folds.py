"""The models of past folds are kept on the GPU.

cause: grows
device: 1 GiB
ends: oom
never: of a loss or a metric
"""

import torch
from torch import nn


def build():
    return nn.Sequential(*[x for _ in range(8) for x in (nn.Linear(1024, 1024), nn.ReLU())]).cuda()


def train(model, steps=6):
    opt = torch.optim.Adam(model.parameters())
    for i in range(steps):
        x = torch.randn(2048, 1024, device="cuda")
        out = model(x)
        loss = out.square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()


models = []
for fold in range(20):
    model = build()
    train(model)
    models.append(model)
