"""A tabular network trained with a cyclic rate: the weights at the end of each cycle are kept and
an average moves along; the ensemble predicts at the end and its predictions are kept."""

import copy

import recorder
import torch
from torch import nn


def layer(a, b):
    return nn.Sequential(nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU(), nn.Dropout(0.2))


model = nn.Sequential(
    layer(431, 2050), layer(2050, 2050), layer(2050, 1025), nn.Linear(1025, 11)
).cuda()
average = torch.optim.swa_utils.AveragedModel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
snapshots, predictions = [], []
for step in recorder.steps(96):
    loss = nn.functional.cross_entropy(
        model(recorder.blank(1024, 431, dtype=torch.float)), recorder.blank(1024, high=11)
    )
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 8 == 7:
        average.update_parameters(model)
        snapshots.append(copy.deepcopy(model).eval().requires_grad_(False))
    recorder.step()
with torch.no_grad():
    for _ in recorder.steps(10):
        x = recorder.blank(5000, 431, dtype=torch.float)
        predictions.append(torch.stack([s(x).softmax(-1) for s in [*snapshots, average.eval()]]))
        recorder.step()
