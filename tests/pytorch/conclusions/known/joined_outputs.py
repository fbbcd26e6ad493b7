"""Each validation joins the outputs of all validations so far: the list is never cleared.

cause: grows
device: 600 MiB
ends: oom
never: shorter inputs
"""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1024)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
outputs = []


def validate():
    for _ in range(10):
        with torch.no_grad():
            outputs.append(model(torch.randn(1024, 1024, device="cuda")))  # the cause
    return torch.cat(outputs).std()


for epoch in range(20):
    for _ in range(10):
        model(torch.randn(1024, 1024, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    validate()
