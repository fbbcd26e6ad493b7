"""Simple recurrent units over documents: the products are batched, the recurrence goes word by
word; the outputs of the top layer are kept for each document."""

import recorder
import torch
from torch import nn

WIDTH = 448
maps = [nn.Linear(WIDTH, 3 * WIDTH).cuda() for _ in range(4)]
words = nn.Embedding(30_000, WIDTH).cuda()
kept = []
with torch.no_grad():
    for _ in recorder.steps(32):
        x = words(recorder.blank(recorder.draw.randrange(40, 130), 8, high=30_000))
        for layer in maps:
            z, f, r = layer(x).chunk(3, -1)
            f, r = f.sigmoid(), r.sigmoid()
            c, out = torch.zeros_like(x[0]), []
            for t in range(len(x)):
                c = f[t] * c + (1 - f[t]) * z[t]
                out.append(r[t] * c.tanh() + (1 - r[t]) * x[t])
            x = torch.stack(out)
        kept.append(x)
        recorder.step()
    torch.cat([k.amax(0) for k in kept]).norm().item()
