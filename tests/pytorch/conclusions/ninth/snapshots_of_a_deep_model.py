"""A snapshot of a model of many levels stays on the GPU after each epoch.

cause: grows
device: 1 GiB
ends: oom
never: with their|copy\.py|of a loss or a metric
"""

import copy

import torch
from torch import nn


class Residual(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Sequential(nn.Linear(width, width), nn.Dropout(0.1))

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v))


class Encoder(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(Residual(Attention(width)), Residual(nn.Linear(width, width)))
            for _ in range(depth)
        )

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Model(nn.Module):
    def __init__(self, width=512, depth=4):
        super().__init__()
        self.backbone = nn.ModuleDict({"encoder": Encoder(width, depth)})

    def forward(self, x):
        return self.backbone["encoder"](x)


model = Model().cuda()
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
snapshots = []
for epoch in range(100):
    for _ in range(3):
        loss = model(torch.rand(8, 32, 512, device="cuda")).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    snapshots.append(copy.deepcopy(model).eval())  # the cause
