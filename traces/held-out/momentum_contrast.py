"""MoCo: two crops of each picture, an encoder that follows with momentum, and a queue of keys."""

import copy

import recorder
import torch
import torch.nn.functional as F
from torch import nn

QUEUE, DIM, BATCH = 65536, 128, 48


class Basic(nn.Module):
    def __init__(self, a, b, stride):
        super().__init__()
        self.c1, self.b1 = nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b)
        self.c2, self.b2 = nn.Conv2d(b, b, 3, 1, 1, bias=False), nn.BatchNorm2d(b)
        self.short = None
        if stride != 1 or a != b:
            self.short = nn.Sequential(nn.Conv2d(a, b, 1, stride, bias=False), nn.BatchNorm2d(b))

    def forward(self, x):
        y = F.relu(self.b1(self.c1(x)), inplace=True)
        y = self.b2(self.c2(y))
        y += x if self.short is None else self.short(x)
        return F.relu(y, inplace=True)


def encoder():
    layers, a = (
        [
            nn.Conv2d(3, 64, 7, 2, 3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(True),
            nn.MaxPool2d(3, 2, 1),
        ],
        64,
    )
    for b, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Basic(a, b, stride), Basic(b, b, 1)]
        a = b
    return nn.Sequential(
        *layers,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, DIM),
    )


query = encoder().cuda()
key = copy.deepcopy(query).requires_grad_(False)
queue = F.normalize(torch.randn(DIM, QUEUE, device="cuda"), dim=0)
pointer = 0
optimizer = torch.optim.SGD(query.parameters(), 0.03, momentum=0.9, weight_decay=1e-4, foreach=True)


def augment(x):
    theta = torch.zeros(x.shape[0], 2, 3, device="cuda")
    theta[:, 0, 0] = theta[:, 1, 1] = 0.7
    grid = F.affine_grid(theta, (x.shape[0], 3, 160, 160), align_corners=False)
    x = F.grid_sample(x, grid, align_corners=False)
    bright = 1 + 0.4 * (torch.rand(x.shape[0], 1, 1, 1, device="cuda") - 0.5)
    grey = x.mean(1, keepdim=True)
    return (x * bright).lerp(grey, 0.2).clamp(0, 1)


for step in recorder.steps(16):
    pictures = (
        torch.zeros(BATCH, 3, 192, 192, dtype=torch.uint8).cuda(non_blocking=True).float().div_(255)
    )
    one, two = augment(pictures), augment(pictures)
    q = F.normalize(query(one), dim=1)
    with torch.no_grad():
        for a, b in zip(query.parameters(), key.parameters()):
            b.mul_(0.999).add_(a, alpha=0.001)
        shuffled = torch.randperm(BATCH, device="cuda")
        k = F.normalize(key(two[shuffled]), dim=1)[torch.argsort(shuffled)]
    positive = torch.einsum("nc,nc->n", q, k).unsqueeze(-1)
    negative = torch.einsum("nc,ck->nk", q, queue.clone().detach())
    logits = torch.cat([positive, negative], 1) / 0.07
    loss = F.cross_entropy(logits, torch.zeros(BATCH, dtype=torch.long, device="cuda"))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    end = min(pointer + BATCH, QUEUE)
    queue[:, pointer:end] = k.T[:, : end - pointer]
    pointer = end % QUEUE
    recorder.step()
