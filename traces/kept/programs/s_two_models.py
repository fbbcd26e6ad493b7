"""Two experts for pictures on streams of their own, their maps are fused and kept; each waits for
the picture, the fusion waits for both."""

import recorder
import torch
from torch import nn


def net(width, depth):
    return (
        nn.Sequential(
            nn.Conv2d(3, width, 4, 4),
            *[
                m
                for _ in range(depth)
                for m in (nn.Conv2d(width, width, 3, 1, 1), nn.BatchNorm2d(width), nn.ReLU())
            ],
        )
        .cuda()
        .eval()
    )


experts, streams = [net(96, 5), net(160, 3)], [torch.cuda.Stream(), torch.cuda.Stream()]
fuse, main = nn.Conv2d(256, 128, 1).cuda(), torch.cuda.current_stream()
kept = []
with torch.no_grad():
    for _ in recorder.steps(75):
        x = recorder.blank(recorder.draw.randrange(3, 9), 3, 320, 416, dtype=torch.float)
        ready, maps = main.record_event(), []
        for expert, stream in zip(experts, streams):
            with torch.cuda.stream(stream):
                stream.wait_event(ready)
                x.record_stream(stream)
                maps.append(expert(x))
        for stream, y in zip(streams, maps):
            main.wait_stream(stream)
            y.record_stream(main)
        y = fuse(torch.cat(maps, 1))
        kept.append((y.half(), y.mean((2, 3))))
        recorder.step()
