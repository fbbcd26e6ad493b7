"""A server with a cache of adapters that is larger than the device.

cause: grows
also: cache
device: 1GiB
ends: oom
"""

from collections import OrderedDict


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


def load(name):
    return {f"{name}.{i}": torch.zeros(512, 512, dtype=torch.float16) for i in range(24)}


class Adapters:
    def __init__(self, most):
        self.most, self.loaded = most, OrderedDict()

    def get(self, name):
        if name not in self.loaded:
            while len(self.loaded) >= self.most:
                self.loaded.popitem(last=False)
            weights = load(name).items()
            self.loaded[name] = {key: one.to("cuda") for key, one in weights}  # the cause
        self.loaded.move_to_end(name)
        return self.loaded[name]


model = Model().cuda().eval().half()
adapters = Adapters(256)
for request in range(2000):
    adapter = adapters.get(request % 300)
    ids = torch.randint(0, 16000, (1, 100 + request % 50), device="cuda")
    with torch.no_grad():
        logits, cache = model(ids)
