"""Each epoch's weights are cloned and kept.

cause: grows
device: 4GiB
ends: oom
"""

import copy

import torch
import torch.nn as nn

model = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(4)]).cuda()
ema = copy.deepcopy(model)
opt = torch.optim.AdamW(model.parameters(), 1e-4)
best, history = None, []
for epoch in range(50):
    for i in range(1):
        loss = model(torch.randn(64, 4096, device="cuda")).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        with torch.no_grad():
            for a, b in zip(ema.parameters(), model.parameters()):
                a.lerp_(b, 0.01)
    history.append({k: v.clone() for k, v in model.state_dict().items()})  # the cause
    best = copy.deepcopy(ema)
    print(epoch, loss.item())
