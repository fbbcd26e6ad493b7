"""A generation with a cache of keys and values, which is meant to grow; the context is too long.

cause: too_large
also: cache, collects, grows, pieces
device: 5 GiB
ends: oom
never: no_grad|inference_mode
"""

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, past):
        q, k, v = self.qkv(x).chunk(3, -1)
        if past is not None:
            k, v = torch.cat([past[0], k], 1), torch.cat([past[1], v], 1)
        return self.out((q @ k.transpose(1, 2)).softmax(-1) @ v), (k, v)


model = nn.ModuleList(Attention(1024) for _ in range(16)).cuda().eval()
past = [None] * 16
with torch.no_grad():
    x = torch.randn(32, 512, 1024, device="cuda")
    for token in range(400):
        for number, layer in enumerate(model):
            x, past[number] = layer(x, past[number])
        x = x[:, -16:]
