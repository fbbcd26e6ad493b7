"""Federated learning: each client of a round trains a copy and hands in its change of the weights;
all of a round are kept for a robust mean (trimmed), of a residual network."""

import copy

import recorder
import torch
from torch import nn


class Res(nn.Module):
    def __init__(self, a, b, stride):
        super().__init__()
        self.c1, self.c2 = (
            nn.Conv2d(a, b, 3, stride, 1, bias=False),
            nn.Conv2d(b, b, 3, 1, 1, bias=False),
        )
        self.n1, self.n2, self.skip = (
            nn.GroupNorm(8, b),
            nn.GroupNorm(8, b),
            nn.Conv2d(a, b, 1, stride),
        )

    def forward(self, x):
        return (self.n2(self.c2(self.n1(self.c1(x)).relu())) + self.skip(x)).relu()


server = nn.Sequential(
    nn.Conv2d(3, 64, 3, 1, 1),
    Res(64, 64, 1),
    Res(64, 136, 2),
    Res(136, 272, 2),
    Res(272, 544, 2),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(544, 62),
).cuda()
for _ in range(2):
    changes = []
    for _ in recorder.steps(60):
        client = copy.deepcopy(server)
        optimizer = torch.optim.SGD(client.parameters(), lr=0.05, momentum=0.9)
        for _ in range(recorder.draw.randrange(1, 3)):
            count = recorder.draw.randrange(10, 65)
            loss = nn.functional.cross_entropy(
                client(recorder.blank(count, 3, 36, 36, dtype=torch.float)),
                recorder.blank(count, high=62),
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            changes.append([a - b for a, b in zip(client.parameters(), server.parameters())])
        recorder.step()
    with torch.no_grad():
        for index, p in enumerate(server.parameters()):
            stacked = torch.stack([c[index] for c in changes])
            p.add_(stacked.sort(0)[0][6:-6].mean(0))
