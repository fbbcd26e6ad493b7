"""More and more requests under way at once; each ends, and leaves nothing behind.

cause: too_large
device: 1GiB
ends: oom
"""

import asyncio


import torch
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


async def generate(length):
    ids = torch.randint(0, 16000, (1, length), device="cuda")
    with torch.no_grad():
        logits, cache = model(ids)
    for _ in range(10):
        token = logits[:, -1:].argmax(-1)
        await asyncio.sleep(0.02)
        with torch.no_grad():
            logits, cache = model(token, cache)


async def main():
    for requests in [8, 16, 24, 32, 80]:
        await asyncio.gather(*(generate(600 + number % 50) for number in range(requests)))
        await asyncio.sleep(0.3)


asyncio.run(main())
