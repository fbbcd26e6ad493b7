"""Lanczos on the Hessian of a network: each Krylov vector, of the model's size, is kept and the new
one made orthogonal to all."""

import recorder
import torch
from torch import nn

model = nn.Sequential(
    nn.Linear(1200, 1750), nn.Softplus(), nn.Linear(1750, 1300), nn.Softplus(), nn.Linear(1300, 100)
).cuda()
parameters = list(model.parameters())


def times(vector):
    total = torch.zeros_like(vector)
    for _ in range(2):
        x, y = recorder.blank(350, 1200, dtype=torch.float), recorder.blank(350, high=100)
        slopes = torch.autograd.grad(
            nn.functional.cross_entropy(model(x), y), parameters, create_graph=True
        )
        inner = torch.cat([s.flatten() for s in slopes]) @ vector
        total += torch.cat([g.flatten() for g in torch.autograd.grad(inner, parameters)])
    return total


vector = torch.randn(sum(p.numel() for p in parameters), device="cuda")
basis, alphas = [vector / vector.norm()], []
for _ in recorder.steps(64):
    w = times(basis[-1])
    with torch.no_grad():
        alphas.append(w @ basis[-1])
        for old in basis:
            w = w - (w @ old) * old
        basis.append(w / (w.norm() + 1e-6))
    recorder.step()
