"""A recurrent cell reads a year of hourly weather step by step, with backpropagation through all.

cause: too_large
device: 4 GiB
ends: oom
never: no_grad|inference_mode|leak
"""
import torch
from torch import nn

HOURS = 24 * 60
STATIONS = 512


class Forecaster(nn.Module):
    def __init__(self, features=12, hidden=256):
        super().__init__()
        self.cell = nn.GRUCell(features, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.read = nn.Linear(hidden, 1)

    def forward(self, series):
        h = series.new_zeros(series.size(1), self.cell.hidden_size)
        predictions = []
        for hour in series:
            h = self.norm(self.cell(hour, h))
            predictions.append(self.read(h))
        return torch.stack(predictions)


def rmse(a, b):
    return (a - b).pow(2).mean().sqrt()


net = Forecaster().cuda()
optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-3)
weather = torch.zeros(HOURS, STATIONS, 12)
truth = torch.zeros(HOURS, STATIONS, 1)

# a curriculum: longer and longer windows of the year
for window in (6 * 24, 12 * 24, 18 * 24, HOURS):
    for repeat in range(2):
        x, y = weather[:window].cuda(), truth[:window].cuda()
        optimizer.zero_grad()
        error = rmse(net(x), y)
        error.backward()
        optimizer.step()
        print(f"{window} hours, pass {repeat}: rmse {error.item():.4f}", flush=True)
