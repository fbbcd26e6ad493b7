"""The logits of a large vocabulary in 32 bits, and their gradient, are nearly all there is.

cause: too_large
device: 3 GiB
ends: oom
never: activation checkpointing
"""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64000, 256)
        self.body = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))
        self.head = nn.Linear(256, 64000, bias=False)

    def forward(self, tokens):
        return self.head(self.body(self.embedding(tokens)))


def loss_of(logits, tokens):
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


model = Net().to(torch.bfloat16).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(6):
    tokens = torch.randint(0, 64000, (8, 512)).cuda()
    loss_of(model(tokens), tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
