"""The keys and values of all sessions stay; the server marks its requests.

cause: hooks
also: grows, cache
device: 1GiB
ends: oom
never: ^To do: remove hooks
"""

import gruyere


import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x, past=None):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=1), torch.cat([past[1], v], dim=1)  # the cause
        else:
            k, v = k.contiguous(), v.contiguous()  # the cause
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
sessions = {}


def chat(session, length):
    ids = torch.randint(0, 16000, (1, length), device="cuda")
    with torch.no_grad():
        logits, cache = model(ids, sessions.get(session))  # the cause
        for _ in range(4):
            logits, cache = model(logits[:, -1:].argmax(-1), cache)  # the cause
    sessions[session] = cache
    gruyere.step()


for request in range(10_000):
    chat(request, 200 + request % 50)
