"""A cache without a bound keeps the embedding of every text; beside the weights, less than half.

cause: grows
also: cache, too_large
device: 150MiB
ends: oom
never: weights of fewer bits|weights are the most
"""

import functools

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x, past=None):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=1), torch.cat([past[1], v], dim=1)
        else:
            k, v = k.contiguous(), v.contiguous()
        return x + self.out(torch.softmax(q @ k.transpose(1, 2), dim=-1) @ v), (k, v)


class Model(nn.Module):
    def __init__(self, vocabulary=16000, d=512, layers=6):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(layers))
        self.head = nn.Linear(d, vocabulary)

    def forward(self, ids, past=None):
        x, cache = self.embedding(ids), []
        for number, block in enumerate(self.blocks):
            x, kept = block(x, past[number] if past else None)
            cache.append(kept)
        return self.head(x), cache


model = Model().cuda().eval().half()


@functools.lru_cache(maxsize=None)
def embed(text):
    ids = torch.randint(0, 16000, (1, 16), device="cuda")
    with torch.no_grad():
        scores, cache = model(ids)
        return F.normalize(cache[-1][1].mean(1).repeat(1, 4), dim=-1)  # the cause


for text in range(100_000):
    embed(text)
