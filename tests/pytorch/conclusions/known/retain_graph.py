"""The graph of each step hangs on the state that goes into the next one.

cause: graph
device: 3 GiB
ends: oom
"""

import torch
from torch import nn


def layers(width, count):
    return nn.Sequential(*[m for _ in range(count) for m in (nn.Linear(width, width), nn.GELU())])


model = layers(1024, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
state = torch.zeros(2048, 1024, device="cuda")
for step in range(100):
    state = model(state + torch.randn_like(state))  # the cause
    state.square().mean().backward(retain_graph=True)
    for parameter in model.parameters():
        parameter.grad = None
    optimizer.step()
