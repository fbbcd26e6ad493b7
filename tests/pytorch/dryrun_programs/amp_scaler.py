"""torch's own recipe for mixed precision: autocast to fp16 and GradScaler, with accumulation and
clipping."""

import torch
from torch import nn

model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cuda")
for _ in range(3):
    for _ in range(2):
        with torch.autocast("cuda", torch.float16):
            loss = model(torch.randn(256, 1024, device="cuda")).square().mean()
        scaler.scale(loss / 2).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
print(loss.item(), scaler.get_scale())
