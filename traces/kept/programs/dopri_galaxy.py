"""Dormand and Prince's method on a chemical network of many cells, steps of adaptive number; the
solution and its derivative are kept at the outputs for dense interpolation."""

import recorder
import torch
from torch import nn

CELLS, SPECIES = 187_000, 37
rates = nn.Sequential(nn.Linear(SPECIES, 150), nn.Tanh(), nn.Linear(150, SPECIES)).cuda()
A = [
    [1 / 5],
    [3 / 40, 9 / 40],
    [44 / 45, -56 / 15, 32 / 9],
    [19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729],
    [9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656],
    [35 / 384, 0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84],
]
E = [71 / 57600, 0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40]
y = torch.ones(CELLS, SPECIES, device="cuda")
kept, h = [], 0.01
with torch.no_grad():
    slope = rates(y)
    for _ in recorder.steps(75):
        for _ in range(recorder.draw.randrange(1, 4)):
            k = [slope]
            for row in A:
                k.append(rates(y + h * sum(a * s for a, s in zip(row, k))))
            new = y + h * sum(a * s for a, s in zip(A[-1], k))
            error = h * sum(e * s for e, s in zip(E, k))
            (
                error / (1e-6 + 1e-3 * torch.maximum(y.abs(), new.abs()))
            ).square().mean().sqrt().item()
            y, slope = new, k[-1]
        kept.append((y, slope))
        recorder.step()
