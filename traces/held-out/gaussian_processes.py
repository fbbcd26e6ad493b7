"""Gaussian processes: the likelihood's gradient through Cholesky, predictions, and a low-rank
approximation."""

import random

import recorder
import torch

rng = random.Random(23)
DIM = 12


def kernel(a, b, log_scale, log_height):
    d = torch.cdist(a / log_scale.exp(), b / log_scale.exp())
    r = 5**0.5 * d
    return log_height.exp() * (1 + r + r.square() / 3) * torch.exp(-r)


def likelihood(x, y, params):
    k = kernel(x, x, params[0], params[1])
    k = k + params[2].exp() * torch.eye(len(x), device="cuda")
    low, _ = torch.linalg.cholesky_ex(k)
    half = torch.linalg.solve_triangular(low, y[:, None], upper=False)
    return 0.5 * half.square().sum() + low.diagonal().log().sum()


def predict(x, y, params, new):
    k = kernel(x, x, params[0], params[1]) + params[2].exp() * torch.eye(len(x), device="cuda")
    low, _ = torch.linalg.cholesky_ex(k)
    weights = torch.cholesky_solve(y[:, None], low)
    means, variances = [], []
    for part in new.split(2000):
        cross = kernel(part, x, params[0], params[1])
        means.append((cross @ weights).squeeze(1))
        v = torch.linalg.solve_triangular(low, cross.T, upper=False)
        variances.append(params[1].exp() - v.square().sum(0))
    return torch.cat(means), torch.cat(variances)


def nystrom(x, y, params, m):
    z = x[torch.randperm(len(x), device="cuda")[:m]]
    kzz = kernel(z, z, params[0], params[1]) + 1e-4 * torch.eye(m, device="cuda")
    kxz = kernel(x, z, params[0], params[1])
    low, _ = torch.linalg.cholesky_ex(kzz)
    phi = torch.linalg.solve_triangular(low, kxz.T, upper=False).T
    q, r = torch.linalg.qr(torch.cat([phi, params[2].exp().sqrt() * torch.eye(m, device="cuda")]))
    return torch.linalg.solve_triangular(r, q[: len(x)].T @ y[:, None], upper=True)


for step in recorder.steps(8):
    n = rng.choice((2000, 3000, 4000, 5000))
    x, y = torch.randn(n, DIM, device="cuda"), torch.randn(n, device="cuda")
    params = [
        torch.zeros(DIM, device="cuda", requires_grad=True),
        torch.zeros((), device="cuda", requires_grad=True),
        torch.full((), -2.0, device="cuda", requires_grad=True),
    ]
    optimizer = torch.optim.Rprop(params, lr=0.05)
    for _ in range(6):
        loss = likelihood(x, y, params)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        mean, variance = predict(x, y, params, torch.randn(6000, DIM, device="cuda"))
        w = nystrom(
            torch.randn(40_000, DIM, device="cuda"), torch.randn(40_000, device="cuda"), params, 500
        )
    recorder.step()
