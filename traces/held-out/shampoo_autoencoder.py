"""An autoencoder under its own Shampoo, whose inverse roots are found by coupled Newton steps."""

import recorder
import torch
import torch.nn.functional as F
from torch import nn


def inverse_root(m, p, iterations=8):
    eye = torch.eye(m.shape[0], device=m.device)
    alpha = -1.0 / p
    z = (1 + p) / (2 * torch.linalg.matrix_norm(m))
    x, y = eye * z.pow(1.0 / p), m * z
    for _ in range(iterations):
        t = (1 - alpha) * eye + alpha * y
        x = x @ t
        y = torch.linalg.matrix_power(t, p) @ y
    return x


class Shampoo(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2, momentum=0.9, every=4, eps=1e-4):
        super().__init__(params, dict(lr=lr, momentum=momentum, every=every, eps=eps))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                g, state = p.grad, self.state[p]
                if not state:
                    state["step"] = 0
                    state["momentum"] = torch.zeros_like(p)
                    state["factors"] = [
                        group["eps"] * torch.eye(n, device=p.device) for n in p.shape
                    ]
                    state["roots"] = [torch.eye(n, device=p.device) for n in p.shape]
                out = g
                for axis, n in enumerate(p.shape):
                    flat = g.movedim(axis, 0).reshape(n, -1)
                    state["factors"][axis].add_(flat @ flat.T)
                    if state["step"] % group["every"] == 0:
                        state["roots"][axis] = inverse_root(state["factors"][axis], 2 * p.dim())
                    out = (
                        torch.tensordot(state["roots"][axis], out, dims=([1], [0]))
                        if p.dim() == 1
                        else (
                            torch.tensordot(out, state["roots"][axis], dims=([axis], [0])).movedim(
                                -1, axis
                            )
                        )
                    )
                state["momentum"].mul_(group["momentum"]).add_(out)
                p.sub_(state["momentum"], alpha=group["lr"])
                state["step"] += 1


sizes = [784, 1000, 500, 250, 30]
layers = []
for a, b in zip(sizes + sizes[-2::-1], sizes[1:] + sizes[-2::-1]):
    layers += [nn.Linear(a, b), nn.Sigmoid()]
net = nn.Sequential(*layers[:-1]).cuda()
optimizer = Shampoo(net.parameters())
data = torch.zeros(10_000, 784).cuda()

for step in recorder.steps(16):
    x = data[torch.randperm(10_000, device="cuda")[:1000]]
    loss = F.binary_cross_entropy_with_logits(net(x), x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 8 == 7:
        with torch.no_grad():
            errors = torch.cat(
                [(net(part).sigmoid() - part).square().sum(1) for part in data.split(1000)]
            )
            print(errors.mean().item())
    recorder.step()
