"""The program may have a tenth of the device, which it has set itself.

cause: ceiling
also: too_large
device: 24 GiB
ends: oom
never: no_grad|inference_mode
"""

import torch
from torch import nn


def layers(width, count):
    return nn.Sequential(*[m for _ in range(count) for m in (nn.Linear(width, width), nn.GELU())])


torch.cuda.set_per_process_memory_fraction(0.1)
model = layers(2048, 8).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(20):
    model(torch.randn(4096 * (step + 1), 2048, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
