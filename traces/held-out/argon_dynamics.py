"""Molecular dynamics of argon: forces of pairs by chunks of atoms, a thermostat, and distances'
histograms."""

import recorder
import torch

N, BOX, DT = 6000, 60.0, 0.002
x = torch.rand(N, 3, device="cuda") * BOX
v = torch.randn(N, 3, device="cuda")
v -= v.mean(0)


def forces(x, chunk=500):
    total, energy = torch.empty_like(x), torch.zeros((), device=x.device)
    for i in range(0, N, chunk):
        d = x[i : i + chunk, None] - x[None]
        d -= BOX * (d / BOX).round()
        r2 = d.square().sum(-1)
        near = (r2 < 9.0 * 3.4**2) & (r2 > 0)
        inverse = torch.where(near, (3.4**2) / r2.clamp(min=0.5), torch.zeros_like(r2))
        six = inverse**3
        pair = 24 * (2 * six**2 - six) * inverse
        total[i : i + chunk] = (pair[..., None] * d).sum(1)
        energy += 2 * (six**2 - six).sum()
    return total, energy


def distances(x, bins=200):
    histogram = torch.zeros(bins, device=x.device)
    for part in x.split(1000):
        d = torch.cdist(part, x)
        histogram += torch.histc(d, bins, 0, BOX / 2)
    return histogram


f, energy = forces(x)
energies, histograms, frames = [], [], []
for step in recorder.steps(20):
    for _ in range(3):
        v = v + 0.5 * DT * f
        x = (x + DT * v) % BOX
        f, energy = forces(x)
        v = v + 0.5 * DT * f
        kinetic = 0.5 * v.square().sum()
        v = v * torch.sqrt(1 + 0.01 * (1.5 * N * 1.2 / kinetic - 1))
        energies.append((energy, kinetic))
    frames.append(x.cpu())
    if step % 5 == 4:
        histograms.append(distances(x))
    recorder.step()
