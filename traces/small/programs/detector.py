"""Vision, training: a detector (a ResNet-like trunk, a pyramid, two heads) on pictures of varied
sizes, padded to the largest of the batch, with as many boxes as each picture has."""

import recorder
import torch
from torch import nn
from torch.nn import functional as F

CLASSES, ANCHORS = 80, 9


def stage(inside, outside):
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, 2, 1, bias=False),
        nn.GroupNorm(32, outside),
        nn.ReLU(),
        nn.Conv2d(outside, outside, 3, 1, 1, bias=False),
        nn.GroupNorm(32, outside),
        nn.ReLU(),
    )


def head(last):
    layers = [
        layer for _ in range(4) for layer in (nn.Conv2d(256, 256, 3, padding=1), nn.ReLU())
    ]
    return nn.Sequential(*layers, nn.Conv2d(256, last * ANCHORS, 3, padding=1))


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        widths = (64, 128, 256, 512, 1024)
        self.trunk = nn.ModuleList([stage(a, b) for a, b in zip((3, *widths), widths)])
        self.lateral = nn.ModuleList([nn.Conv2d(width, 256, 1) for width in widths[2:]])
        self.smooth = nn.ModuleList([nn.Conv2d(256, 256, 3, padding=1) for _ in widths[2:]])
        self.classes, self.boxes = head(CLASSES), head(4)

    def forward(self, x):
        found = []
        for part in self.trunk:
            x = part(x)
            found.append(x)
        top, levels = None, []
        for x, lateral, smooth in zip(
            reversed(found[2:]), reversed(self.lateral), reversed(self.smooth)
        ):
            x = lateral(x)
            if top is not None:
                x = x + F.interpolate(top, size=x.shape[-2:])
            top = x
            levels.append(smooth(x))
        flat = [
            tuple(
                part(level).permute(0, 2, 3, 1).reshape(len(level), -1, size)
                for part, size in ((self.classes, CLASSES), (self.boxes, 4))
            )
            for level in levels
        ]
        return [torch.cat(parts, 1) for parts in zip(*flat)]


def overlap(one, other):
    """Intersection over union of all pairs, as every detector matches its anchors."""
    least = torch.max(one[:, None, :2], other[None, :, :2])
    most = torch.min(one[:, None, 2:], other[None, :, 2:])
    common = (most - least).clamp(min=0).prod(2)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(1) for boxes in (one, other)]
    return common / (areas[0][:, None] + areas[1] - common)


model = Detector().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
for _ in recorder.steps(8):
    sizes = [(recorder.draw.randrange(320, 544, 32), recorder.draw.randrange(320, 640, 32))
             for _ in range(4)]
    pictures = torch.zeros(4, 3, max(h for h, _ in sizes), max(w for _, w in sizes), device="cuda")
    for place, (height, width) in zip(pictures, sizes):
        place[:, :height, :width].copy_(torch.zeros(3, height, width))
    scores, boxes = model(pictures)
    anchors = torch.zeros(boxes.shape[1], 4, device="cuda")
    losses = []
    for score, box in zip(scores, boxes):
        wanted = torch.zeros(recorder.draw.randint(1, 40), 4).cuda()
        best, chosen = overlap(wanted, anchors).max(0)
        target = torch.zeros_like(score)
        target[:, 0] = (best > 0.5).float()
        chance = score.sigmoid()
        weight = (target - chance).abs() ** 2
        losses.append(
            (weight * F.binary_cross_entropy_with_logits(score, target, reduction="none")).sum()
            + F.smooth_l1_loss(box, wanted[chosen])
        )
    loss = torch.stack(losses).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    recorder.step()
