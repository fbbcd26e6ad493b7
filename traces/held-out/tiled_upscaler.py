"""Upscales large pictures tile by tile; finished tiles go to pinned memory on a stream of their
own."""

import random

import recorder
import torch
from torch import nn

rng = random.Random(1234)


class Dense(nn.Module):
    def __init__(self, c=64, g=32):
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(c + i * g, g if i < 4 else c, 3, padding=1) for i in range(5)
        )
        self.act = nn.LeakyReLU(0.2, inplace=True)

    def forward(self, x):
        seen = [x]
        for conv in self.convs[:-1]:
            seen.append(self.act(conv(torch.cat(seen, 1))))
        return x + 0.2 * self.convs[-1](torch.cat(seen, 1))


class Rrdb(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(Dense(), Dense(), Dense())

    def forward(self, x):
        return x + 0.2 * self.body(x)


net = (
    nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1),
        *[Rrdb() for _ in range(8)],
        nn.Conv2d(64, 64, 3, padding=1),
        nn.Upsample(scale_factor=2),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.LeakyReLU(0.2, True),
        nn.Upsample(scale_factor=2),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.LeakyReLU(0.2, True),
        nn.Conv2d(64, 3, 3, padding=1),
    )
    .half()
    .cuda()
    .eval()
)
out_stream = torch.cuda.Stream()
TILE, PAD = 128, 16


@torch.inference_mode()
def upscale(height, width):
    picture = (
        torch.zeros(1, 3, height, width, dtype=torch.half).pin_memory().cuda(non_blocking=True)
    )
    done = torch.empty(3, height * 4, width * 4, dtype=torch.uint8, pin_memory=True)
    pending = []
    for top in range(0, height, TILE):
        for left in range(0, width, TILE):
            bottom, right = min(top + TILE, height), min(left + TILE, width)
            t, l = max(top - PAD, 0), max(left - PAD, 0)
            y = net(picture[:, :, t : min(bottom + PAD, height), l : min(right + PAD, width)])
            y = y[0, :, (top - t) * 4 : (bottom - t) * 4, (left - l) * 4 : (right - l) * 4]
            y = y.clamp(0, 1).mul(255).round().to(torch.uint8)
            out_stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(out_stream):
                done[:, top * 4 : bottom * 4, left * 4 : right * 4].copy_(y, non_blocking=True)
                event = out_stream.record_event()
            pending.append((y, event))
            if len(pending) > 3:
                pending.pop(0)[1].synchronize()
    out_stream.synchronize()
    return done


for step in recorder.steps(8):
    upscale(rng.choice((480, 540, 720)), rng.choice((640, 854, 960, 1280)))
    recorder.step()
