"""Stochastic gradient Langevin dynamics of a text classifier: after the first steps the weights of
every second one are kept, cloned, for an average of predictions."""

import recorder
import torch
from torch import nn

model = nn.Sequential(
    nn.EmbeddingBag(97_000, 300),
    nn.Linear(300, 1100),
    nn.ReLU(),
    nn.Linear(1100, 530),
    nn.ReLU(),
    nn.Linear(530, 20),
).cuda()
samples = []
for step in recorder.steps(60):
    x, y = (
        recorder.blank(256, recorder.draw.randrange(30, 300), high=97_000),
        recorder.blank(256, high=20),
    )
    loss = nn.functional.cross_entropy(model(x), y)
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(p.grad + 1e-4 * p, alpha=-1e-3).add_(torch.randn_like(p), alpha=1e-3)
    if step >= 10 and step % 2:
        samples.append({k: v.detach().clone() for k, v in model.state_dict().items()})
    recorder.step()
with torch.no_grad():
    x = recorder.blank(2048, 120, high=97_000)
    votes = [torch.func.functional_call(model, s, (x,)).softmax(-1) for s in samples]
    torch.stack(votes).mean(0).argmax(-1).cpu()
