"""A search of widths that measures sharpness: each trial's model and its graph stay for ever.

cause: graph
also: grows
device: 6 GiB
ends: oom
never: no_grad|inference_mode|smaller batch
"""

import itertools

import torch
from torch import nn

DEVICE = "cuda:0"


class Trial:
    def __init__(self, width, depth, lr):
        layers = [nn.Linear(256, width), nn.Softplus()]
        for _ in range(depth - 1):
            layers += [nn.Linear(width, width), nn.Softplus()]
        self.model = nn.Sequential(*layers, nn.Linear(width, 10)).to(DEVICE)  # the cause
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)

    def sharpness(self):
        """Hutchinson's estimate of the trace, from the gradients that backward has left."""
        params = list(self.model.parameters())
        probes = [torch.randn_like(p) for p in params]
        products = torch.autograd.grad(
            [p.grad for p in params], params, grad_outputs=probes, retain_graph=True
        )
        return sum((v * h).sum() for v, h in zip(probes, products, strict=True)).item()

    def run(self, steps=4):
        for _ in range(steps):
            x = torch.randn(8192, 256, device=DEVICE)
            y = torch.randint(0, 10, (8192,), device=DEVICE)
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(x), y)  # the cause
            # The gradients refer to the graph and the graph to the parameters: unless zero_grad()
            # comes after, nothing breaks that circle.
            loss.backward(create_graph=True)  # the cause
            trace = self.sharpness()
            self.optimizer.step()
        return loss.item(), trace


results = []
grid = itertools.product([1024, 1536, 2048], [3, 4, 5], [0.1, 0.03, 0.01, 0.003])
for number, (width, depth, lr) in enumerate(grid):
    loss, trace = Trial(width, depth, lr).run()
    results.append({"width": width, "depth": depth, "lr": lr, "loss": loss, "trace": trace})
    print(number, results[-1], flush=True)
print(min(results, key=lambda r: abs(r["trace"])))
