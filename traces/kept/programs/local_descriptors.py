"""Retrieval of images by local descriptors: at three scales the strongest places of a picture are
described and whitened; descriptors, places and strengths are kept."""

import recorder
import torch
from torch import nn
from torch.nn import functional as F

net = (
    nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 256, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(256, 768, 3, 2, 1),
        nn.ReLU(),
    )
    .cuda()
    .half()
)
whiten = nn.Linear(768, 128).cuda().half()
index = []
with torch.inference_mode():
    for _ in recorder.steps(85):
        picture = recorder.blank(
            1,
            3,
            recorder.draw.randrange(600, 1100),
            recorder.draw.randrange(600, 1100),
            dtype=torch.half,
        )
        found = []
        for scale in (0.5, 0.71, 1.0):
            maps = net(F.interpolate(picture, scale_factor=scale, mode="bilinear"))[0].flatten(1)
            strength = maps.norm(dim=0)
            best, where = strength.topk(min(700, len(strength)))
            found.append(
                (F.normalize(whiten(maps[:, where.clamp(0, 0)].t()), dim=1).float(), where, best)
            )
        index.append([torch.cat(parts) for parts in zip(*found)])
        recorder.step()
    for number in range(12):
        for other in index[number::9]:
            (index[number][0] @ other[0].t()).topk(2, 1)[0].float().mean().item()
