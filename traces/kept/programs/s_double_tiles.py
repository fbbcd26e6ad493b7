"""Aerial pictures in tiles with two buffers that are filled in turn on a copy stream; the features
of every tile are kept on the device."""

import recorder
import torch
from torch import nn

copies, main = torch.cuda.Stream(), torch.cuda.current_stream()
net = nn.Sequential(
    *[
        m
        for a, b in ((4, 40), (40, 80), (80, 160), (160, 300))
        for m in (nn.Conv2d(a, b, 3, 2, 1), nn.GroupNorm(4, b), nn.GELU())
    ]
).cuda()
buffers = [torch.empty(10, 4, 500, 500, device="cuda") for _ in range(2)]
filled, empty = [torch.cuda.Event() for _ in range(2)], [torch.cuda.Event() for _ in range(2)]
host = torch.zeros(10, 4, 500, 500).pin_memory()


def fill(at):
    with torch.cuda.stream(copies):
        copies.wait_event(empty[at])
        buffers[at].copy_(host, non_blocking=True)
        filled[at].record(copies)


for event in empty:
    event.record()
fill(0)
kept = []
with torch.inference_mode():
    for step in recorder.steps(120):
        fill((step + 1) % 2)
        main.wait_event(filled[step % 2])
        y = net(buffers[step % 2])
        empty[step % 2].record()
        kept.append(y.half())
        recorder.step()
