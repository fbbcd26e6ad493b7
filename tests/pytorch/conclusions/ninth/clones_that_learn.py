"""Meta-learning: a copy of the model is trained for each task, and a log keeps the learners.

cause: grows
device: 1 GiB
ends: oom
never: of a loss or a metric
"""

import copy

import torch
from torch import nn


class Learner:
    def __init__(self, model):
        self.model = copy.deepcopy(model)  # the cause
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-3)

    def fit(self, steps=5):
        for _ in range(steps):
            loss = self.model(torch.randn(64, 1024, device="cuda")).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return loss.item()


model = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(1024, 1024), nn.Tanh())]).cuda()
log = []
for task in range(60):
    learner = Learner(model)
    log.append((learner.fit(), learner))
