"""Second-order MAML whose meta-batch is doubled until the inner graphs of its tasks do not fit.

cause: too_large
device: 8 GiB
ends: oom
never: no_grad|inference_mode|detach
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call

dev = torch.device("cuda")
net = nn.Sequential(
    nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
    nn.Flatten(), nn.Linear(64, 5),
).to(dev)  # fmt: skip
meta_opt = torch.optim.Adam(net.parameters(), lr=1e-3)


def sample_task(shots=5, ways=5, side=84):
    y = torch.arange(ways, device=dev).repeat(shots)
    xs, xq = torch.randn(2, shots * ways, 3, side, side, device=dev)
    return xs, y, xq, y


def adapt(weights, x, y, steps=5, lr=0.01):
    for _ in range(steps):
        loss = F.cross_entropy(functional_call(net, weights, (x,)), y)
        grads = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        weights = {n: w - lr * g for (n, w), g in zip(weights.items(), grads, strict=True)}
    return weights


iteration = 0
for tasks in (2, 4, 8, 16):
    for _ in range(2):
        outer = []
        for _ in range(tasks):
            xs, ys, xq, yq = sample_task()
            fast = adapt(dict(net.named_parameters()), xs, ys)
            outer.append(F.cross_entropy(functional_call(net, fast, (xq,)), yq))
        meta_loss = torch.stack(outer).mean()
        meta_opt.zero_grad()
        meta_loss.backward()
        meta_opt.step()
        iteration += 1
        print(iteration, "tasks", tasks, "meta loss", float(meta_loss), flush=True)
