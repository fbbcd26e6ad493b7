"""Optimal transport between sets of cells of successive days: Sinkhorn's sweeps on each pair of
days; the plans are kept in half precision, and the potentials."""

import recorder
import torch

days = [torch.zeros(recorder.draw.randrange(3000, 7600), 50, device="cuda") for _ in range(25)]
plans = []
with torch.no_grad():
    for index in recorder.steps(72):
        a, b = days[index % 24], days[(index + 1 + index // 24) % 25]
        cost = torch.cdist(a, b).square()
        cost = cost / (cost.median() + 1e-6)
        f, g = torch.zeros(len(a), device="cuda"), torch.zeros(len(b), device="cuda")
        for _ in range(10):
            f = -0.05 * ((g - cost) / 0.05).logsumexp(1)
            g = -0.05 * ((f[:, None] - cost) / 0.05).logsumexp(0)
        plan = ((f[:, None] + g - cost) / 0.05).exp()
        plans.append((plan.half(), f, g, plan.sum(1)))
        recorder.step()
