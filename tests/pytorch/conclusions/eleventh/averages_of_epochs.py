"""An average of the weights is made after each epoch, and all are kept; SGD has no states.

cause: grows
device: 800 MiB
ends: oom
never: history_size|states of the optimiser
"""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(6)]).cuda()
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
averages = []
for epoch in range(20):
    for step in range(4):
        model(torch.randn(64, 2048).cuda()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    averages.append(AveragedModel(model))  # the cause
