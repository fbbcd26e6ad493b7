"""Shapley values by sampling permutations of features: the outputs of every coalition are kept for
a regression at the end."""

import recorder
import torch
from torch import nn

FEATURES = 230
model = nn.Sequential(
    nn.Linear(FEATURES, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 5)
).cuda()
background = recorder.blank(90, FEATURES, dtype=torch.float)
masks, outputs = [], []
with torch.no_grad():
    for _ in recorder.steps(80):
        sample = recorder.blank(FEATURES, dtype=torch.float)
        count = recorder.draw.randrange(150, 340)
        mask = torch.rand(count, FEATURES, device="cuda") < torch.rand(count, 1, device="cuda")
        mixed = torch.where(mask[:, None], sample, background).flatten(0, 1)
        y = model(mixed).softmax(-1).view(count, 90, 5)
        masks.append(mask)
        outputs.append(y.mean(1))
        kernel = (FEATURES - 1) / (mask.sum(1) * (FEATURES - mask.sum(1)) + 1.0)
        weighted = mask.float() * kernel[:, None]
        outputs.append(weighted.t() @ mask.float())
        recorder.step()
