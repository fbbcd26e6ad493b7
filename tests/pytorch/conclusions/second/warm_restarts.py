"""Warm restarts: each cycle makes a new Adam, and the schedulers of past cycles hold the old ones.

cause: optimizer_twice
device: 8 GiB
ends: oom
never: no_grad|inference_mode|smaller batch|batch size|checkpoint
"""

import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR


class Mixer(nn.Module):
    def __init__(self, width=2560, depth=6):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(),
                          nn.Linear(2 * width, width))
            for _ in range(depth)
        )  # fmt: skip

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


class Trainer:
    def __init__(self, model, cycle_length):
        self.model, self.cycle_length = model, cycle_length
        self.schedules = []

    def restart(self):
        self.optimizer = AdamW(self.model.parameters(), lr=1e-3)  # the cause
        self.schedules.append(CosineAnnealingLR(self.optimizer, self.cycle_length))  # the cause

    def cycle(self):
        for _ in range(self.cycle_length):
            x = torch.randn(256, 2560, device="cuda")
            loss = (self.model(x) - x).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()  # the cause
            self.schedules[-1].step()
        return loss.item()


with torch.device("cuda"):
    model = Mixer()
trainer = Trainer(model, cycle_length=8)
for number in range(10):
    trainer.restart()
    print("cycle", number, "loss", trainer.cycle(), flush=True)
    print("rates", [s.get_last_lr()[0] for s in trainer.schedules], flush=True)
