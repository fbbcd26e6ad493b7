"""A mixture of experts, each of which runs on its part of the tokens; the batch is too large.

cause: too_large
device: 4 GiB
ends: oom
never: no_grad|inference_mode|retain_graph|\.item\(\)
"""

import torch
from torch import nn


def layers(width, count):
    return nn.Sequential(*[m for _ in range(count) for m in (nn.Linear(width, width), nn.GELU())])


class Experts(nn.Module):
    def __init__(self, width, count):
        super().__init__()
        self.experts = nn.ModuleList(layers(width, 2) for _ in range(count))

    def forward(self, x):
        parts = x.chunk(len(self.experts))
        return torch.cat([expert(part) for expert, part in zip(self.experts, parts)])


model = nn.Sequential(*[Experts(1024, 8) for _ in range(6)]).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(20):
    model(torch.randn(40000, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
