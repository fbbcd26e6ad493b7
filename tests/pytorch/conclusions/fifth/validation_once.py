"""The first evaluation keeps its graph in a variable, and the next training step does not fit
beside it.

cause: no_grad
also: too_large
device: 900MiB
ends: oom
never: To do: give this step less
"""

import torch
import torch.nn.functional as F
from torch import nn

layers = [nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(12)]
net = nn.Sequential(*layers, nn.Linear(1024, 10)).cuda()
optimizer = torch.optim.AdamW(net.parameters())


def train_step():
    x, y = torch.randn(4096, 1024).cuda(), torch.randint(0, 10, (4096,)).cuda()
    F.cross_entropy(net(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def evaluate():
    net.eval()
    x, y = torch.randn(4096, 1024).cuda(), torch.randint(0, 10, (4096,)).cuda()
    output = net(x)  # the cause
    loss = F.cross_entropy(output, y)
    net.train()
    return loss


for epoch in range(5):
    for step in range(20):
        train_step()
    validation = evaluate()
