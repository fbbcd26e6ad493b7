"""Recommender: big embedding tables, dense Adam.

cause: too_large
device: 640 MiB
ends: oom
never: no_grad|smaller batch|\.item\(\)
"""
import torch
from torch import nn
import torch.nn.functional as F


class TwoTower(nn.Module):
    def __init__(self, users=600_000, items=200_000, dim=64):
        super().__init__()
        self.user = nn.Embedding(users, dim)
        self.item = nn.Embedding(items, dim)
        self.mlp = nn.Sequential(nn.Linear(2 * dim, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, u, i):
        return self.mlp(torch.cat([self.user(u), self.item(i)], -1))[:, 0]


def main():
    with torch.device("cuda"):
        model = TwoTower()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(1000):
        u = torch.zeros(4096, dtype=torch.long).cuda()
        i = torch.zeros(4096, dtype=torch.long).cuda()
        clicked = torch.ones(4096).cuda()
        loss = F.binary_cross_entropy_with_logits(model(u, i), clicked)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


main()
