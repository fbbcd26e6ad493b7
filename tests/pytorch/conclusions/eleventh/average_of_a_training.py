"""One average of the weights beside a training by SGD without states, whose batch is too large.

cause: too_large
device: 1250 MiB
ends: oom
never: states of the optimiser
"""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(12)]).cuda()
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
average = AveragedModel(model)
for step in range(10):
    model(torch.randn(15000, 2048).cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    average.update_parameters(model)
