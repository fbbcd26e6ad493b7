"""Every third step logs an image tensor that stays on the GPU.

cause: grows
also: cache
device: 1 GiB
ends: oom
"""

import torch
from torch import nn


def layers(width, count):
    return nn.Sequential(*[m for _ in range(count) for m in (nn.Linear(width, width), nn.GELU())])


model = layers(1024, 4).cuda()
optimizer = torch.optim.AdamW(model.parameters())


class Logger:
    images = {}

    def log(self, name, image):
        self.images.setdefault(name, []).append(image.float().clamp(0, 1))  # the cause


logger = Logger()
for step in range(600):
    x = torch.randn(2048, 1024, device="cuda")
    y = model(x)
    y.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 3 == 0:
        logger.log("sample", y.detach())
