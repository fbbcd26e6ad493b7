"""Segmentation, evaluation: the class maps of every picture are kept as probabilities in half
precision, for a confusion matrix and calibration at the end."""

import recorder
import torch
from torch import nn
from torch.nn import functional as F


def block(inside, outside, stride=1):
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside), nn.ReLU()
    )


class Net(nn.Module):
    def __init__(self, classes=19):
        super().__init__()
        self.a, self.b, self.c = block(3, 32, 2), block(32, 64, 2), block(64, 160, 2)
        self.up1, self.up2 = block(224, 96), block(128, 48)
        self.head = nn.Conv2d(48, classes, 1)

    def forward(self, x):
        a = self.a(x)
        b = self.b(a)
        c = self.c(b)
        y = self.up1(torch.cat([F.interpolate(c, size=b.shape[2:], mode="bilinear"), b], 1))
        y = self.up2(torch.cat([F.interpolate(y, size=a.shape[2:], mode="bilinear"), a], 1))
        return F.interpolate(self.head(y), size=x.shape[2:], mode="bilinear")


model = Net().cuda().eval()
kept = []
with torch.no_grad():
    for _ in recorder.steps(45):
        height, width = recorder.draw.choice([(360, 640), (480, 640), (427, 640), (500, 375)])
        x = recorder.blank(2, 3, height, width, dtype=torch.float)
        logits = model(x)
        kept.append(logits.softmax(1).half())
        kept[-1].argmax(1).float().mean().item()
        recorder.step()
