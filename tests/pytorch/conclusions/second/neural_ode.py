"""A neural ODE integrated by Runge-Kutta inside forward; the horizon of the curriculum grows.

cause: too_large
device: 6 GiB
ends: oom
never: no_grad|inference_mode|detach
"""

import torch
from torch import nn


class Field(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d + 1, h), nn.Tanh(), nn.Linear(h, h), nn.Tanh(),
                                 nn.Linear(h, d))  # fmt: skip

    def forward(self, t, y):
        return self.net(torch.cat([y, t.expand(len(y), 1)], dim=-1))


def rk4(f, t, dt, y):
    k1 = f(t, y)
    k2 = f(t + dt / 2, y + dt / 2 * k1)
    k3 = f(t + dt / 2, y + dt / 2 * k2)
    k4 = f(t + dt, y + dt * k3)
    return y + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)


class NeuralODE(nn.Module):
    def __init__(self, d=64, h=512):
        super().__init__()
        self.field = Field(d, h)

    def forward(self, y, times):
        path = [y]
        for a, b in zip(times[:-1], times[1:], strict=True):
            y = rk4(self.field, a, b - a, y)
            path.append(y)
        return torch.stack(path)


model = NeuralODE().to("cuda")
optim = torch.optim.RMSprop(model.parameters(), lr=1e-3)

for epoch, horizon in enumerate([4, 8, 12, 16, 24, 32]):
    times = torch.linspace(0, 1, horizon + 1, device="cuda")
    for _ in range(2):
        truth = torch.randn(horizon + 1, 16384, 64, device="cuda")
        optim.zero_grad()
        loss = (model(truth[0], times) - truth).abs().mean()
        loss.backward()
        optim.step()
    print("epoch", epoch, "horizon", horizon, "loss", loss.item(), flush=True)
