"""An evaluation keeps what the model returned, of each batch.

cause: collects
device: 1 GiB
ends: oom
never: activation checkpointing|accumulated
"""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8000, 512)
        self.head = nn.Linear(512, 8000)

    def forward(self, tokens):
        return self.head(self.embedding(tokens))  # the cause


model = Net().cuda()
optimizer = torch.optim.AdamW(model.parameters())


def batch():
    return torch.randint(0, 8000, (4, 128)).cuda()


for step in range(8):
    tokens = batch()
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

predictions = []
with torch.no_grad():
    for _ in range(100):
        predictions.append(model(batch()))  # the cause
