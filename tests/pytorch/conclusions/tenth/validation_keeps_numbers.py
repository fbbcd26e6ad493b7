"""As validation_keeps_scores, but of each batch a number is kept: then a larger batch is trained.

cause: too_large
device: 256 MiB
ends: oom
never: move what is collected
"""

import torch
import torch.nn.functional as F
from torch import nn


def net():
    layers = [nn.Conv2d(3, 64, 3, padding=1)]
    for _ in range(6):
        layers += [nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1)]
    deep = [nn.Conv2d(64, 1024, 8, 8), nn.ReLU(), nn.ConvTranspose2d(1024, 64, 8, 8)]
    return nn.Sequential(*layers, *deep, nn.Conv2d(64, 8, 1))


model = net().cuda()
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)


def batches(number, size=4):
    for _ in range(number):
        yield torch.randn(size, 3, 96, 96), torch.randint(8, (size, 96, 96))


def validate():
    model.eval()
    right = []
    for images, mask in batches(40):
        with torch.no_grad():
            out = model(images.cuda())
        right.append((out.softmax(1).argmax(1) == mask.cuda()).float().mean().item())
    model.train()
    return sum(right) / len(right)


def train(size):
    for images, mask in batches(8, size):
        loss = F.cross_entropy(model(images.cuda()), mask.cuda())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


for epoch in range(2):
    train(4 if epoch == 0 else 16)
    print(epoch, validate())
