"""Detection, evaluation: for every picture the best boxes, their scores and the features pooled at
them are kept until the average precision is taken at the end."""

import recorder
import torch
from torch import nn


def conv(a, b, s):
    return nn.Sequential(nn.Conv2d(a, b, 3, s, 1), nn.GroupNorm(8, b), nn.SiLU())


body = nn.Sequential(conv(3, 24, 2), conv(24, 56, 2), conv(56, 112, 2), conv(112, 200, 2)).cuda()
tower = nn.Sequential(conv(200, 200, 1), conv(200, 200, 1)).cuda()
score, box = nn.Conv2d(200, 9 * 80, 3, 1, 1).cuda(), nn.Conv2d(200, 9 * 4, 3, 1, 1).cuda()
found = []
with torch.no_grad():
    for _ in recorder.steps(70):
        height, width = (
            recorder.draw.randrange(480, 833, 32),
            recorder.draw.randrange(640, 1345, 32),
        )
        x = recorder.blank(1, 3, height, width, dtype=torch.float)
        maps = body(x)
        y = tower(maps)
        scores = score(y).view(9, 80, -1).permute(2, 0, 1).reshape(-1, 80).sigmoid()
        boxes = box(y).view(9, 4, -1).permute(2, 0, 1).reshape(-1, 4)
        best, which = scores.flatten().topk(min(1000, scores.numel()))
        boxes = boxes[(which // 80).clamp(0, 0)]
        pooled = maps.flatten(2)[0].t()[(which // 720).clamp(0, 0)]
        found.append({"boxes": boxes, "scores": best, "labels": which % 80, "features": pooled})
        best.mean().item()
        recorder.step()
    torch.cat([f["features"] for f in found]).norm(dim=1).mean().item()
