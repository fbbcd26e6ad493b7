"""Gradients of each sample, by vmap, projected at random and kept: data attribution (TRAK)."""

import recorder
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

model = nn.Sequential(
    nn.Linear(620, 410), nn.GELU(), nn.Linear(410, 410), nn.GELU(), nn.Linear(410, 30)
).cuda()
parameters = {k: v.detach() for k, v in model.named_parameters()}
count = sum(p.numel() for p in parameters.values())
projections = {
    k: torch.randn(v.numel(), 512, device="cuda", dtype=torch.half) for k, v in parameters.items()
}


def loss(parameters, x, y):
    return nn.functional.cross_entropy(functional_call(model, parameters, (x[None],)), y[None])


each = vmap(grad(loss), in_dims=(None, 0, 0))
kept = []
for _ in recorder.steps(36):
    size = recorder.draw.choice([128, 128, 96, 77])
    gradients = each(
        parameters, recorder.blank(size, 620, dtype=torch.float), recorder.blank(size, high=30)
    )
    kept.append(sum(g.flatten(1).half() @ projections[k] for k, g in gradients.items()))
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
    kept.append(norms)
    recorder.step()
features = torch.cat(kept[::2]).float()
(features.t() @ features).diagonal().sum().item()
