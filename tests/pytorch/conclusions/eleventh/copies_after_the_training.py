"""After the training, its model is copied three times.

cause: too_large
device: 700 MiB
ends: oom
never: give this step less
"""

import copy

import torch
from torch import nn

model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(12)]).cuda()
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
for step in range(4):
    model(torch.randn(64, 2048).cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
best = copy.deepcopy(model)
merged = copy.deepcopy(model)
third = {name: weight.clone() for name, weight in model.state_dict().items()}
