"""The whole dataset is moved to the device before the training, in nine parts.

cause: too_large
device: 900 MiB
ends: oom
never: (?<!else )a smaller batch
"""

import torch
from torch import nn

model = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(768, 768), nn.GELU())]).cuda()
optimizer = torch.optim.AdamW(model.parameters())
features = [torch.zeros(32, 768, 768).cuda() for _ in range(9)]  # the cause
for step in range(6):
    model(features[step][:12]).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
