"""The weights of each epoch are kept on the GPU.

cause: grows
device: 1GiB
ends: oom
"""

import copy

import torch
from torch import nn

net = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)]).cuda()
optimizer = torch.optim.AdamW(net.parameters())
best = []


def snapshot(module):
    return copy.deepcopy(module.state_dict())  # the cause


for epoch in range(200):
    for step in range(5):
        net(torch.randn(64, 1024, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    best.append(snapshot(net))  # the cause
