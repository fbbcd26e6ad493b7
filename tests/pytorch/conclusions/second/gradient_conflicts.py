"""Training of several tasks at once that remembers each step's gradients to compare their angles.

cause: grows
device: 8 GiB
ends: oom
never: no_grad|inference_mode|smaller batch|batch size|checkpoint
"""

import torch
from torch import nn
from torch.nn.functional import cosine_similarity, cross_entropy

TASKS = ("age", "mood", "topic")


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(),
        )  # fmt: skip
        self.heads = nn.ModuleDict({t: nn.Linear(4096, 20) for t in TASKS})

    def forward(self, x, task):
        return self.heads[task](self.trunk(x))


class ConflictMeter:
    def __init__(self, trunk):
        self.trunk = trunk
        self.seen = {}

    def note(self, step, task):
        grads = [p.grad.reshape(-1) for p in self.trunk.parameters()]
        self.seen[step, task] = torch.cat(grads)  # the cause

    def angles(self, step):
        now = [self.seen[step, t] for t in TASKS]
        return [cosine_similarity(a, b, dim=0).item() for a, b in zip(now, now[1:], strict=False)]


model = MultiTask().cuda()
meter = ConflictMeter(model.trunk)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(400):
    for task in TASKS:
        x = torch.randn(512, 1024, device="cuda")
        y = torch.randint(20, (512,), device="cuda")
        optimizer.zero_grad()
        cross_entropy(model(x, task), y).backward()
        meter.note(step, task)
        optimizer.step()
    print(step, meter.angles(step), flush=True)
