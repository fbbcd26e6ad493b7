"""Denoising long recordings: windows of sound through a mask network, kept, and put together by
overlap-add per recording; the recordings are kept too."""

import recorder
import torch
from torch import nn

WINDOW, HOP = 6000, 3000
encode = nn.Conv1d(1, 256, 40, 20).cuda()
mask = nn.Sequential(
    *[
        m
        for d in (1, 2, 4, 8, 16)
        for m in (
            nn.Conv1d(256, 256, 3, padding=d, dilation=d, groups=256),
            nn.Conv1d(256, 256, 1),
            nn.PReLU(),
        )
    ],
    nn.Conv1d(256, 256, 1),
    nn.Sigmoid(),
).cuda()
decode = nn.ConvTranspose1d(256, 1, 40, 20).cuda()
recordings = []
fade = torch.hann_window(WINDOW, device="cuda")
with torch.no_grad():
    for _ in recorder.steps(36):
        sound = recorder.blank(recorder.draw.randrange(300_000, 1_200_000, HOP), dtype=torch.float)
        windows, parts = sound.unfold(0, WINDOW, HOP), []
        for some in windows.split(32):
            x = encode(some[:, None].contiguous())
            parts.append(decode(x * mask(x))[:, 0] * fade)
        clean = torch.cat(parts)
        out = nn.functional.fold(
            clean.t()[None], (1, (len(clean) - 1) * HOP + WINDOW), (1, WINDOW), stride=(1, HOP)
        )
        recordings.append(out.flatten())
        recorder.step()
