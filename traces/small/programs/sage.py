"""Graph network, training: GraphSAGE on neighbourhoods that are sampled anew for each batch, the
features of all nodes on the device."""

import recorder
import torch
from torch import nn
from torch.nn import functional as F

NODES, FEATURES, CLASSES = 400_000, 128, 47


class Sage(nn.Module):
    def __init__(self, inside, outside):
        super().__init__()
        self.own, self.others = nn.Linear(inside, outside), nn.Linear(inside, outside, bias=False)

    def forward(self, x, source, target, count):
        total = torch.zeros(count, x.shape[1], device="cuda").index_add(0, target, x[source])
        degree = torch.zeros(count, device="cuda").index_add(
            0, target, torch.ones(len(target), device="cuda")
        )
        return self.own(x[:count]) + self.others(total / degree.clamp(min=1)[:, None])


layers = nn.ModuleList([Sage(FEATURES, 256), Sage(256, 256), Sage(256, CLASSES)]).cuda()
features = torch.zeros(NODES, FEATURES, device="cuda")
labels = torch.zeros(NODES, dtype=torch.long, device="cuda")
optimizer = torch.optim.Adam(layers.parameters(), lr=3e-3)
for _ in recorder.steps(10):
    # Neighbours that two nodes share are taken once, so the layers of a sample are of any size.
    counts = [1024]
    for neighbours in (15, 10, 5):
        counts.append(int(counts[-1] * (1 + neighbours * recorder.draw.uniform(0.3, 0.7))))
    nodes = recorder.blank(counts[-1], high=NODES)
    x = features[nodes]
    for layer, inside, outside in zip(layers, counts[::-1], counts[-2::-1]):
        edges = int(inside * recorder.draw.uniform(1.0, 1.3))
        source, target = recorder.blank(2, edges, high=outside)
        x = layer(x, source, target, outside)
        if layer is not layers[-1]:
            x = F.dropout(F.relu(x), 0.5)
    loss = F.cross_entropy(x, labels[nodes[: counts[0]]])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    loss.item()
    recorder.step()
