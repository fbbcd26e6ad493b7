"""Representations of speech: the outputs of all layers of an encoder are kept for each batch, for
probes of the layers."""

import recorder
import torch
from torch import nn

front = (
    nn.Sequential(
        nn.Conv1d(1, 512, 10, 5),
        nn.GELU(),
        *[m for k in (3, 3, 3, 2, 2) for m in (nn.Conv1d(512, 512, k, 2), nn.GELU())],
        nn.Conv1d(512, 768, 1),
    )
    .half()
    .cuda()
)
layers = (
    nn.ModuleList(
        [
            nn.TransformerEncoderLayer(
                768, 12, 3072, activation="gelu", batch_first=True, dropout=0
            )
            for _ in range(12)
        ]
    )
    .half()
    .cuda()
)
kept = []
with torch.no_grad():
    for _ in recorder.steps(62):
        x = front(
            recorder.blank(
                recorder.draw.randrange(3, 9),
                1,
                recorder.draw.randrange(60_000, 250_000),
                dtype=torch.half,
            )
        ).transpose(1, 2)
        states = [x]
        for layer in layers:
            x = layer(x)
            states.append(x)
        kept.append(states)
        recorder.step()
