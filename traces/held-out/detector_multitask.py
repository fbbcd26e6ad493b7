"""A detector with a pyramid and heads for boxes, classes and masks, trained on pictures of
many sizes."""

import random

import recorder
import torch
import torch.nn.functional as F
from torch import nn

rng = random.Random(99)
C = 128


def conv(a, b, k=3, s=1):
    return nn.Sequential(
        nn.Conv2d(a, b, k, s, k // 2, bias=False), nn.BatchNorm2d(b), nn.SiLU(inplace=True)
    )


class Csp(nn.Module):
    def __init__(self, c, n):
        super().__init__()
        self.a, self.b, self.out = conv(c, c // 2, 1), conv(c, c // 2, 1), conv(c, c, 1)
        self.inner = nn.ModuleList(
            nn.Sequential(conv(c // 2, c // 2, 1), conv(c // 2, c // 2)) for _ in range(n)
        )

    def forward(self, x):
        a = self.a(x)
        for layer in self.inner:
            a = a + layer(a)
        return self.out(torch.cat([a, self.b(x)], 1))


class Detector(nn.Module):
    def __init__(self, classes=80):
        super().__init__()
        self.stem = nn.Sequential(
            conv(3, 32), conv(32, 64, 3, 2), Csp(64, 1), conv(64, 128, 3, 2), Csp(128, 2)
        )
        self.s3 = nn.Sequential(conv(128, 256, 3, 2), Csp(256, 3))
        self.s4 = nn.Sequential(conv(256, 384, 3, 2), Csp(384, 3))
        self.s5 = nn.Sequential(conv(384, 512, 3, 2), Csp(512, 1))
        self.lateral = nn.ModuleList(nn.Conv2d(c, C, 1) for c in (256, 384, 512))
        self.smooth = nn.ModuleList(conv(C, C) for _ in range(3))
        self.cls = nn.Sequential(conv(C, C), nn.Conv2d(C, classes, 1))
        self.box = nn.Sequential(conv(C, C), nn.Conv2d(C, 4, 1))
        self.mask = nn.Sequential(
            conv(C, C), nn.Upsample(scale_factor=2), conv(C, C), nn.Conv2d(C, 32, 1)
        )
        self.logvar = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        c3 = self.s3(self.stem(x))
        c4 = self.s4(c3)
        c5 = self.s5(c4)
        p5 = self.lateral[2](c5)
        p4 = self.lateral[1](c4) + F.interpolate(p5, size=c4.shape[-2:], mode="nearest")
        p3 = self.lateral[0](c3) + F.interpolate(p4, size=c3.shape[-2:], mode="nearest")
        levels = [s(p) for s, p in zip(self.smooth, (p3, p4, p5))]
        scores = torch.cat([self.cls(p).flatten(2) for p in levels], 2).transpose(1, 2)
        boxes = torch.cat([self.box(p).flatten(2) for p in levels], 2).transpose(1, 2)
        return scores, boxes, self.mask(levels[0])


def iou(a, b):
    top, low = torch.max(a[:, None, :2], b[None, :, :2]), torch.min(a[:, None, 2:], b[None, :, 2:])
    inter = (low - top).clamp(min=0).prod(2)
    area = lambda x: (x[:, 2:] - x[:, :2]).prod(1)
    return inter / (area(a)[:, None] + area(b)[None] - inter + 1e-6)


model = Detector().cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.937, nesterov=True)

for step in recorder.steps(12):
    side = rng.randrange(14, 25) * 32
    pictures = torch.zeros(4, 3, side, side).cuda(non_blocking=True)
    objects = [rng.randrange(1, 24) for _ in range(4)]
    scores, boxes, protos = model(pictures)
    cls_loss = box_loss = mask_loss = 0.0
    for i, n in enumerate(objects):
        truth, kinds = torch.zeros(n, 4).cuda(), torch.zeros(n, dtype=torch.long).cuda()
        with torch.no_grad():
            overlap = iou(boxes[i], truth)
            quality, near = overlap.topk(min(10, overlap.shape[0]), dim=0)
            target = torch.zeros_like(scores[i])
            target[near.flatten(), kinds.repeat(near.shape[0])] = quality.flatten()
        cls_loss = cls_loss + F.binary_cross_entropy_with_logits(scores[i], target)
        picked = boxes[i][near.flatten()]
        box_loss = box_loss + F.smooth_l1_loss(picked, truth.repeat(near.shape[0], 1))
        coefficient = torch.randn(n, 32, device="cuda")
        masks = torch.einsum("nc,chw->nhw", coefficient, protos[i])
        wanted = torch.zeros(n, *protos.shape[-2:]).cuda()
        mask_loss = mask_loss + F.binary_cross_entropy_with_logits(masks, wanted)
    losses = torch.stack([cls_loss, box_loss, mask_loss])
    loss = (losses * torch.exp(-model.logvar) + model.logvar).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    recorder.step()
