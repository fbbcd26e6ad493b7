"""Four ranks of a language model in training, of which rank 1 keeps the logits of each step in a
metric: the program of the picture of `gruyere top` (top).

    for rank in 0 1 2 3; do
        RANK=$rank LOCAL_RANK=$rank WORLD_SIZE=4 \\
            python -m gruyere._stand_in python -m gruyere docs/pictures/ranks.py &
    done
    gruyere top

In a terminal of 168 by 51, some minutes after the start; the picture is of tmux's `capture-pane
-e`, as a page in Chromium. There is no process group: each rank is a process that knows its
number.
"""

import os
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

RANK = int(os.environ.get("RANK", "0"))
WIDTH, HEADS, LAYERS, WORDS, LENGTH, BATCH = 2048, 16, 24, 32000, 1024, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        return self.out((scores @ v).transpose(1, 2).reshape(batch, length, WIDTH))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Meter:
    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def keep(self, logits: torch.Tensor) -> None:
        self.seen.append(logits[0, -400:].float())


words, head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
model = nn.Sequential(words, *(Layer() for _ in range(LAYERS)), head).to(torch.bfloat16).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
meter = Meter()
for step in range(100_000):
    length = LENGTH - 128 * ((step + RANK) % 3)
    batch = torch.randint(WORDS, (BATCH, length), device="cuda")
    logits = model(batch)
    F.cross_entropy(logits.flatten(0, 1), batch.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
    if RANK == 1:
        meter.keep(logits.detach())
    time.sleep(0.3)
