"""Hamiltonian Monte Carlo of a hierarchical logistic regression: many chains, draws kept on the
card."""

import random

import recorder
import torch
import torch.nn.functional as F

rng = random.Random(271)
CHAINS, ROWS, FEATURES, GROUPS = 32, 20_000, 40, 50
x = torch.randn(ROWS, FEATURES, device="cuda")
group = torch.randint(GROUPS, (ROWS,)).cuda()
y = torch.zeros(ROWS).cuda()
SIZES = {"beta": FEATURES, "alpha": GROUPS, "mu": 1, "log_sigma": 1}


def split(theta):
    return dict(zip(SIZES, theta.split(list(SIZES.values()), 1)))


def log_density(theta):
    p = split(theta)
    logits = p["beta"] @ x.T + p["alpha"][:, group]
    likelihood = -F.binary_cross_entropy_with_logits(
        logits, y.expand_as(logits), reduction="none"
    ).sum(1)
    sigma = p["log_sigma"].exp()
    prior = -0.5 * p["beta"].square().sum(1) - 0.5 * ((p["alpha"] - p["mu"]) / sigma).square().sum(
        1
    )
    return (
        likelihood + prior - GROUPS * p["log_sigma"].squeeze(1) - 0.5 * p["mu"].square().squeeze(1)
    )


def gradient(theta):
    theta = theta.detach().requires_grad_(True)
    value = log_density(theta)
    return value.detach(), torch.autograd.grad(value.sum(), theta)[0]


theta = torch.randn(CHAINS, sum(SIZES.values()), device="cuda") * 0.1
mass = torch.ones(theta.shape[1], device="cuda")
size = torch.full((CHAINS, 1), 0.01, device="cuda")
draws = []
for step in recorder.steps(30):
    momentum = torch.randn_like(theta) * mass.sqrt()
    value, g = gradient(theta)
    start = value - 0.5 * (momentum**2 / mass).sum(1)
    proposal, p = theta, momentum
    p = p + 0.5 * size * g
    leaps = rng.randrange(8, 25)
    for i in range(leaps):
        proposal = proposal + size * p / mass
        new, g = gradient(proposal)
        p = p + (size if i < leaps - 1 else 0.5 * size) * g
    end = new - 0.5 * (p**2 / mass).sum(1)
    accept = torch.rand(CHAINS, device="cuda").log() < end - start
    theta = torch.where(accept[:, None], proposal, theta)
    if step < 15:
        size = size * torch.where(accept[:, None], 1.02, 0.95)
        if step == 14:
            mass = 1 / torch.stack(draws[-10:]).flatten(0, 1).var(0).clamp(min=1e-3)
            draws.clear()
    draws.append(theta.clone())
    recorder.step()
kept = torch.stack(draws)
within = kept.var(0).mean(0)
between = kept.mean(0).var(0)
print((between / within.clamp(min=1e-9)).max().item())
