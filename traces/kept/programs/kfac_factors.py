"""Fisher information in Kronecker factors over a data set: the factors of each layer are kept for
each class of the data, and the gradients of the classes."""

import recorder
import torch
from torch import nn

sizes = [1000, 1300, 900, 400]
layers = [nn.Linear(a, b).cuda() for a, b in zip(sizes, sizes[1:])]
factors = []
for _ in recorder.steps(20):
    inside = [torch.zeros(a + 1, a + 1, device="cuda") for a in sizes[:-1]]
    outside = [torch.zeros(b, b, device="cuda") for b in sizes[1:]]
    for _ in range(4):
        x, given, made = (
            recorder.blank(recorder.draw.randrange(200, 700), 1000, dtype=torch.float),
            [],
            [],
        )
        for layer in layers:
            given.append(x)
            x = layer(x)
            x.retain_grad()
            made.append(x)
            x = x.tanh()
        x.square().sum().backward()
        with torch.no_grad():
            for i, g in enumerate(given):
                one = torch.cat([g, torch.ones(len(g), 1, device="cuda")], 1)
                inside[i] += one.t() @ one / len(g)
                outside[i] += made[i].grad.t() @ made[i].grad / len(g)
    factors.append((inside, outside, [layer.weight.grad for layer in layers]))
    for layer in layers:
        layer.zero_grad()
    recorder.step()
