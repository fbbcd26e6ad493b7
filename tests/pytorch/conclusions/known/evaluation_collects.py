"""An evaluation under no_grad collects its logits on the GPU.

cause: collects
also: grows
device: 4 GiB
ends: oom
never: no_grad|inference_mode
"""

import torch
from torch import nn


def layers(width, count):
    return nn.Sequential(*[m for _ in range(count) for m in (nn.Linear(width, width), nn.GELU())])


model = layers(1024, 4).cuda()
head = nn.Linear(1024, 32000).cuda()
optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()])
for step in range(4):
    head(model(torch.randn(512, 1024, device="cuda"))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
logits = []
with torch.no_grad():
    for batch in range(200):
        logits.append(head(model(torch.randn(512, 1024, device="cuda"))))  # the cause
