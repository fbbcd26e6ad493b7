"""MAML through torch.func: inner steps for a batch of tasks under vmap, per-sample gradients
at the end."""

import random

import recorder
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

rng = random.Random(13)


def block(a, b):
    return [nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(8, b), nn.ReLU(), nn.MaxPool2d(2)]


net = nn.Sequential(
    *block(1, 32), *block(32, 32), *block(32, 32), *block(32, 32), nn.Flatten(), nn.Linear(32, 5)
).cuda()
params = {k: v.detach().clone().requires_grad_() for k, v in net.named_parameters()}
optimizer = torch.optim.Adam(params.values(), lr=1e-3)


def loss_of(weights, x, y):
    return F.cross_entropy(functional_call(net, weights, (x,)), y)


def task(weights, support, labels, query, wanted):
    for _ in range(3):
        grads = grad(loss_of)(weights, support, labels)
        weights = {k: w - 0.01 * grads[k] for k, w in weights.items()}
    return loss_of(weights, query, wanted)


for step in recorder.steps(12):
    shots = rng.choice((1, 5))
    tasks = 4
    support = torch.zeros(tasks, 5 * shots, 1, 28, 28).cuda()
    query = torch.zeros(tasks, 5 * 5, 1, 28, 28).cuda()
    labels = torch.arange(5).repeat_interleave(shots).repeat(tasks, 1).cuda()
    wanted = torch.arange(5).repeat_interleave(5).repeat(tasks, 1).cuda()
    losses = vmap(task, in_dims=(None, 0, 0, 0, 0))(params, support, labels, query, wanted)
    optimizer.zero_grad()
    losses.mean().backward()
    optimizer.step()
    if step % 6 == 5:
        fixed = {k: v.detach() for k, v in params.items()}
        one = lambda w, x, y: loss_of(w, x[None], y[None])
        each = vmap(grad(one), in_dims=(None, 0, 0))(fixed, query[0], wanted[0])
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
        print(norms.mean().item())
    recorder.step()
