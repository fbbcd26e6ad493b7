"""Integrated gradients of a classifier of chest pictures: attributions and saliency smoothed over
noise are kept for each picture."""

import recorder
import torch
from torch import nn

model = (
    nn.Sequential(
        nn.Conv2d(1, 32, 7, 4, 3),
        nn.ReLU(),
        nn.Conv2d(32, 96, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(96, 256, 3, 2, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(256, 14),
    )
    .cuda()
    .eval()
)
for p in model.parameters():
    p.requires_grad_(False)
kept = []
for _ in recorder.steps(34):
    x = recorder.blank(10, 1, 509, 509, dtype=torch.float)
    total = torch.zeros_like(x)
    for part in torch.linspace(0, 1, 12):
        at = (x * part).requires_grad_()
        model(at)[:, 3].sum().backward()
        total += at.grad
    smooth = []
    for _ in range(4):
        at = (x + 0.1 * torch.randn_like(x)).requires_grad_()
        smooth.append(torch.autograd.grad(model(at).amax(1).sum(), at)[0].abs())
    kept.append((total * x / 12, torch.stack(smooth).mean(0)))
    recorder.step()
