"""Hamiltonian Monte Carlo of a logistic regression, many chains at once: positions, energies and
gradients of each draw are kept."""

import recorder
import torch

CHAINS, FEATURES, ROWS = 700, 310, 4000
data = torch.randn(ROWS, FEATURES, device="cuda")
labels = torch.zeros(ROWS, device="cuda")


def energy(q):
    logits = q @ data.t()
    return torch.nn.functional.softplus(logits).sum(1) - logits @ labels + 0.5 * q.square().sum(1)


def gradient(q):
    q = q.detach().requires_grad_()
    return torch.autograd.grad(energy(q).sum(), q)[0]


q = torch.zeros(CHAINS, FEATURES, device="cuda")
draws, energies, slopes = [], [], []
for _ in recorder.steps(110):
    p = torch.randn_like(q)
    before = energy(q) + 0.5 * p.square().sum(1)
    new, slope = q, gradient(q)
    for _ in range(6):
        p = p - 0.005 * slope
        new = new + 0.01 * p
        slope = gradient(new)
        p = p - 0.005 * slope
    after = energy(new) + 0.5 * p.square().sum(1)
    take = (torch.rand_like(before).log() < before - after)[:, None]
    q = torch.where(take, new, q)
    draws.append(q)
    energies.append(after)
    slopes.append(slope)
    recorder.step()
torch.stack(draws).var(0).mean().item()
