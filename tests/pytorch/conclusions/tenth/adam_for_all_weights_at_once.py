"""AdamW steps all weights at once (foreach): its temporaries do not fit beside its states.

cause: too_large
device: 600 MiB
ends: oom
never: states of the optimiser .(2[6-9]|3)
"""

import torch
from torch import nn

model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(8)]).cuda()
optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
for step in range(6):
    loss = model(torch.randn(16, 2048).cuda()).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
