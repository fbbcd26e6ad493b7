"""One layer is called 24 times in a forward; the batch is too large.

cause: too_large
device: 4 GiB
ends: oom
never: no_grad|inference_mode|retain_graph|\.item\(\)
"""

import torch
from torch import nn


class Universal(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.enter = nn.Linear(width, width)
        self.block = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())

    def forward(self, x):
        x = self.enter(x)
        for _ in range(24):
            x = x + self.block(x)
        return x


model = Universal(2048).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(20):
    model(torch.randn(8192, 2048, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
