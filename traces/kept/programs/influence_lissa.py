"""Influence functions: the inverse Hessian times a test gradient by LiSSA with double backward; one
vector of the size of the model is kept for each test sample."""

import recorder
import torch
from torch import nn

model = nn.Sequential(
    nn.Linear(784, 900), nn.Tanh(), nn.Linear(900, 450), nn.Tanh(), nn.Linear(450, 10)
).cuda()
parameters = list(model.parameters())


def loss(x, y):
    return nn.functional.cross_entropy(model(x), y)


influences = []
for _ in recorder.steps(28):
    x, y = recorder.blank(1, 784, dtype=torch.float), recorder.blank(1, high=10)
    vector = torch.autograd.grad(loss(x, y), parameters)
    estimate = [v.clone() for v in vector]
    for _ in range(12):
        x, y = recorder.blank(recorder.draw.randrange(100, 400), 784, dtype=torch.float), None
        y = torch.zeros(len(x), dtype=torch.long, device="cuda")
        slopes = torch.autograd.grad(loss(x, y), parameters, create_graph=True)
        inner = sum((s * e).sum() for s, e in zip(slopes, estimate))
        product = torch.autograd.grad(inner, parameters)
        with torch.no_grad():
            estimate = [v + 0.99 * e - p / 25 for v, e, p in zip(vector, estimate, product)]
    influences.append(torch.cat([e.flatten() for e in estimate]))
    recorder.step()
(torch.stack(influences) @ influences[0]).cpu()
