"""Embeddings of proteins of very varied lengths, sorted by none: residues, the mean, and the
contact map from all attention heads are kept, each of its own size."""

import recorder
import torch
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS, LAYERS = 480, 20, 8
with torch.device("cuda"):
    embed = nn.Embedding(33, WIDTH)
    layers = [
        (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
        )
        for _ in range(LAYERS)
    ]
    contact = nn.Linear(LAYERS * HEADS, 1)
kept = []
with torch.no_grad():
    for _ in recorder.steps(90):
        length = min(1022, int(recorder.draw.lognormvariate(5.6, 0.6)))
        x, maps = embed(recorder.blank(1, length, high=33)), []
        for qkv, out, up, down in layers:
            q, k, v = (
                qkv(F.layer_norm(x, (WIDTH,))).unflatten(-1, (3, HEADS, 24)).permute(2, 0, 3, 1, 4)
            )
            weight = (q @ k.transpose(2, 3) / 24**0.5).softmax(-1)
            maps.append(weight)
            x = x + out((weight @ v).transpose(1, 2).flatten(2))
            x = x + down(F.gelu(up(F.layer_norm(x, (WIDTH,)))))
        maps = torch.cat(maps, 1)
        maps = maps + maps.transpose(2, 3)
        maps = maps - maps.sum(2, keepdim=True) * maps.sum(3, keepdim=True) / maps.sum(
            (2, 3), keepdim=True
        )
        kept.append((x[0], x.mean(1), contact(maps.permute(0, 2, 3, 1)).sigmoid()[0, ..., 0]))
        recorder.step()
