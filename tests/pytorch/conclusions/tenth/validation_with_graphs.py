"""A validation without `no_grad`, which keeps the scores of some batches, and so their graphs.

cause: no_grad
also:  too_large
device: 640 MiB
ends: oom
never: call backward
"""

import torch
import torch.nn.functional as F
from torch import nn


def net():
    layers = [nn.Conv2d(3, 64, 3, padding=1)]
    for _ in range(12):
        layers += [nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1)]
    deep = [nn.Conv2d(64, 1024, 8, 8), nn.ReLU(), nn.ConvTranspose2d(1024, 64, 8, 8)]
    return nn.Sequential(*layers, *deep, nn.Conv2d(64, 8, 1))


model = net().cuda()
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)


def batches(number):
    for _ in range(number):
        yield torch.randn(4, 3, 96, 96), torch.randint(8, (4, 96, 96))


def validate():
    model.eval()
    scores, masks = [], []
    for images, mask in batches(400):
        out = model(images.cuda())
        scores.append(out.softmax(1))
        masks.append(mask.cuda())
    model.train()
    return (torch.cat(scores).argmax(1) == torch.cat(masks)).float().mean().item()


def train():
    for images, mask in batches(8):
        loss = F.cross_entropy(model(images.cuda()), mask.cuda())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


for epoch in range(2):
    train()
    print(epoch, validate())
