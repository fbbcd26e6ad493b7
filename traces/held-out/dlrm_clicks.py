"""Click prediction in the way of DLRM: bags of embeddings of many tables, pairwise products,
Adagrad."""

import random

import recorder
import torch
import torch.nn.functional as F
from torch import nn

rng = random.Random(8)
ROWS = [
    1_400_000,
    900_000,
    520_000,
    300_000,
    280_000,
    142_000,
    90_000,
    38_000,
    17_000,
    12_000,
    7_000,
    5_600,
    2_200,
    1_500,
    980,
    600,
    305,
    106,
    63,
    27,
    24,
    18,
    10,
    4,
    3,
]
DIM = 64


def mlp(*sizes):
    layers = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Dlrm(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(n, DIM, mode="sum", device="cuda") for n in ROWS
        )
        self.bottom = mlp(13, 512, 256, DIM).cuda()
        pairs = (len(ROWS) + 1) * len(ROWS) // 2
        self.top = mlp(DIM + pairs, 1024, 1024, 512, 256, 1).cuda()
        self.lower = torch.tril_indices(len(ROWS) + 1, len(ROWS) + 1, -1).cuda()

    def forward(self, dense, bags):
        x = self.bottom(dense)
        parts = [x] + [table(i, o) for table, (i, o) in zip(self.tables, bags)]
        stack = torch.stack(parts, 1)
        product = torch.bmm(stack, stack.transpose(1, 2))
        flat = product[:, self.lower[0], self.lower[1]]
        return self.top(torch.cat([x, flat], 1)).squeeze(1)


model = Dlrm()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
history = []

for step in recorder.steps(10):
    batch = 4096
    dense = torch.zeros(batch, 13).cuda()
    bags = []
    for n in ROWS:
        per = [rng.choice((1, 1, 1, 2, 5)) if n > 10_000 else 1 for _ in range(64)] * (batch // 64)
        offsets = torch.tensor([0] + per[:-1]).cumsum(0)
        bags.append((torch.randint(n, (sum(per),)).cuda(), offsets.cuda()))
    label = torch.zeros(batch).cuda()
    loss = F.binary_cross_entropy_with_logits(model(dense, bags), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.detach())
    if step % 5 == 4:
        print("mean loss", torch.stack(history).mean().item())
        history.clear()
    recorder.step()
