"""GraphSAGE by sampled neighbourhoods: the features are on the card, messages go through
index_add."""

import random

import recorder
import torch
import torch.nn.functional as F
from torch import nn

rng = random.Random(11)
NODES, FEATURES, CLASSES = 170_000, 128, 40


class Sage(nn.Module):
    def __init__(self, inside, outside):
        super().__init__()
        self.own, self.other = nn.Linear(inside, outside), nn.Linear(inside, outside, bias=False)

    def forward(self, x, source, target, count):
        total = x.new_zeros(count, x.shape[1]).index_add_(0, target, x[source])
        degree = x.new_zeros(count).index_add_(0, target, torch.ones_like(target, dtype=x.dtype))
        mean = total / degree.clamp(min=1).unsqueeze(1)
        return self.own(x[:count]) + self.other(mean)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Sage(FEATURES, 256), Sage(256, 256), Sage(256, CLASSES)])
        self.norms = nn.ModuleList([nn.BatchNorm1d(256), nn.BatchNorm1d(256)])

    def forward(self, x, blocks):
        for i, (layer, (source, target, count)) in enumerate(zip(self.layers, blocks)):
            x = layer(x, source, target, count)
            if i < 2:
                x = F.dropout(F.relu(self.norms[i](x)), 0.5, self.training)
        return x


def sample(seeds):
    """Sizes of the neighbourhoods as a sampler would find them; nodes repeat among neighbours."""
    blocks, count = [], seeds
    for fan in (5, 10, 15):
        edges = sum(min(fan, int(rng.paretovariate(1.2) * 4)) for _ in range(count // 8)) * 8
        nodes = min(NODES, count + int(edges * rng.uniform(0.55, 0.8)))
        source = torch.randint(nodes, (edges,)).cuda()
        target = torch.randint(count, (edges,)).sort().values.cuda()
        blocks.append((source, target, count))
        count = nodes
    return torch.randint(NODES, (count,)), blocks[::-1]


features = torch.zeros(NODES, FEATURES).cuda()
labels = torch.zeros(NODES, dtype=torch.long).cuda()
model = Net().cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

for step in recorder.steps(24):
    size = 256 if step % 8 else rng.randrange(40, 256)
    nodes, blocks = sample(size // 8 * 8)
    nodes = nodes.cuda()
    out = model(features[nodes], blocks)
    loss = F.cross_entropy(out, labels[nodes[: out.shape[0]]])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    recorder.step()
