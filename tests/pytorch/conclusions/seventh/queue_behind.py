"""Requests queue up in front of a worker that is slower than they come.

cause: grows
also: too_large
device: 512MiB
ends: oom
never: fewer bits
"""

import queue
import threading
import time


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
waiting = queue.Queue()


def work():
    while True:
        x = torch.cat([waiting.get() for _ in range(4)])
        with torch.no_grad():
            model.blocks[0](x)
        time.sleep(0.5)


threading.Thread(target=work, daemon=True).start()
while True:
    x = torch.randn(1, 200, 512, dtype=torch.float16)
    waiting.put(x.to("cuda"))  # the cause
    time.sleep(0.001)
