"""A callback keeps a copy of the weights of each evaluation on the GPU, to average them later.

cause: grows
device: 2 GiB
ends: oom
never: no_grad|inference_mode|smaller (batch|model)|checkpointing
"""
import torch
import torch.nn as nn


class Tabular(nn.Module):
    def __init__(self, columns=400, width=2048, depth=4):
        super().__init__()
        sizes = [columns] + [width] * depth
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:]))
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        for linear in self.hidden:
            x = torch.relu(linear(x))
        return self.out(x).squeeze(-1)


class Callback:
    def after_epoch(self, trainer):
        pass


class Progress(Callback):
    def after_epoch(self, trainer):
        print(f"epoch {trainer.epoch}: lr {trainer.scheduler.get_last_lr()[0]:.2e}", flush=True)


class Snapshots(Callback):
    def __init__(self):
        self.history = []

    def after_epoch(self, trainer):
        state = trainer.model.state_dict()
        copy = {name: value.detach().clone() for name, value in state.items()}  # the cause
        self.history.append((trainer.epoch, copy))  # the cause


class Trainer:
    def __init__(self, model, callbacks):
        self.model = model.cuda()
        self.callbacks = callbacks
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 200)

    def fit(self, epochs, batches=2, size=8192):
        for self.epoch in range(epochs):
            for _ in range(batches):
                x = torch.zeros(size, 400, device="cuda")
                loss = (self.model(x) - x[:, 0]).square().mean()
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
            self.scheduler.step()
            for callback in self.callbacks:
                callback.after_epoch(self)


Trainer(Tabular(), [Progress(), Snapshots()]).fit(200)
