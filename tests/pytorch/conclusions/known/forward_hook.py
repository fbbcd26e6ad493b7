"""A hook, registered once a module, appends what each module returns.

cause: hooks
also: grows
device: 4 GiB
ends: oom
"""

import torch
from torch import nn


def layers(width, count):
    return nn.Sequential(*[m for _ in range(count) for m in (nn.Linear(width, width), nn.GELU())])


model = layers(1024, 6).cuda()
optimizer = torch.optim.AdamW(model.parameters())
activations = []
for module in model:
    module.register_forward_hook(lambda module, args, out: activations.append(out.detach()))
for step in range(200):
    model(torch.randn(2048, 1024, device="cuda")).square().mean().backward()  # the cause
    optimizer.step()
    optimizer.zero_grad()
