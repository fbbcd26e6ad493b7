"""A slide of pathology in tiles that overlap: each tile's probabilities and embedding are kept, and
stitched when a row of tiles is done."""

import recorder
import torch
from torch import nn


def conv(a, b, s=1):
    return nn.Sequential(nn.Conv2d(a, b, 3, s, 1), nn.InstanceNorm2d(b), nn.LeakyReLU())


down = nn.ModuleList([conv(3, 32), conv(32, 64, 2), conv(64, 128, 2), conv(128, 256, 2)]).cuda()
up = nn.ModuleList([conv(384, 128), conv(192, 64), conv(96, 32)]).cuda()
head, TILE, STEP = nn.Conv2d(32, 9, 1).cuda(), 768, 640
rows, embeddings = [], []
with torch.inference_mode():
    for row in recorder.steps(5):
        strip = torch.zeros(9, TILE, STEP * 14 + 128, device="cuda")
        for column in range(14):
            x, skips = recorder.blank(1, 3, TILE, TILE, dtype=torch.float), []
            for layer in down:
                x = layer(x)
                skips.append(x)
            embeddings.append(skips.pop().mean((2, 3)))
            for layer in up:
                x = layer(torch.cat([nn.functional.interpolate(x, scale_factor=2), skips.pop()], 1))
            strip[:, :, column * STEP : column * STEP + TILE] += head(x)[0].softmax(0)
            recorder.step()
        rows.append(strip.half()[:, 64:-64].contiguous())
