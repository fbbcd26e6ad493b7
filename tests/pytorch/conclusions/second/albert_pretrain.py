"""Masked-token pretraining of an ALBERT-like encoder: one layer's weights, applied twelve times.

cause: too_large
device: 16 GiB
ends: oom
never: no_grad|inference_mode|detach
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

BATCH, LENGTH, WIDTH, HEADS, REPEATS, WORDS = 64, 512, 1024, 16, 12, 30000


class SharedLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, HEADS, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        a = F.dropout(torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(c // HEADS), -1), 0.1) @ v
        x = self.n1(x + F.dropout(self.out(a.transpose(1, 2).reshape(b, t, c)), 0.1))
        return self.n2(x + F.dropout(self.down(F.gelu(self.up(x))), 0.1))


class Albert(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.project = nn.Embedding(WORDS, 128), nn.Linear(128, WIDTH)
        self.layer = SharedLayer()
        self.head = nn.Linear(WIDTH, 128)

    def forward(self, ids):
        x = self.project(self.words(ids))
        for _ in range(REPEATS):
            x = self.layer(x)
        return self.head(x) @ self.words.weight.T


model = Albert().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(1000):
    ids = torch.randint(0, WORDS, (BATCH, LENGTH), device="cuda")
    loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.3f}", flush=True)
