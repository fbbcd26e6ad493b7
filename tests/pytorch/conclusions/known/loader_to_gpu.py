"""A dataset moves its samples to the GPU, and keeps them.

cause: grows
also: cache
device: 2 GiB
ends: oom
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


def layers(width, count):
    return nn.Sequential(*[m for _ in range(count) for m in (nn.Linear(width, width), nn.GELU())])


class Cached(Dataset):
    def __init__(self):
        self.cache = {}

    def __len__(self):
        return 100000

    def __getitem__(self, index):
        if index not in self.cache:
            self.cache[index] = torch.randn(1 << 21).cuda()  # the cause
        return self.cache[index]


model = layers(1024, 4).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for batch in DataLoader(Cached(), batch_size=8):
    model(batch.view(-1, 1024)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
