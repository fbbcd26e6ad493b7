"""Fine-tuning as most programs have it: a model that is loaded on the host and moved to the device;
accumulation, another length at every batch, evaluation between."""

import random

import torch
from torch import nn
from torch.nn import functional as F

from gruyere._bench.programs import SEED, Block, Decoder, blank, loss_of

draw, width = random.Random(SEED), 2048
with torch.device("meta"):
    model = Decoder([Block(width, 16, 5632) for _ in range(16)], width, 32000).to(torch.bfloat16)
model = model.to_empty(device="cpu").cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
for step in range(12):
    for _ in range(4):
        tokens = blank(draw.randint(1, 4), draw.randrange(100, 700))
        loss = loss_of(model(tokens), tokens) / 4
        loss.backward()
        del tokens, loss
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if step % 4 == 3:
        with torch.no_grad():
            for _ in range(4):
                tokens = blank(8, draw.randrange(100, 700))
                F.softmax(model(tokens), -1)
                del tokens
