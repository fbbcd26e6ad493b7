"""A particle filter: states and weights of every step stay for the smoother."""

import recorder
import torch

torch.set_grad_enabled(False)
N, D = 700_000, 18
state = torch.randn(N, D, device="cuda")
history = []
for t in recorder.steps(60):
    noise = torch.randn(N, D, device="cuda") * 0.1
    state = torch.tanh(state @ torch.eye(D, device="cuda")) * 0.9 + noise
    logw = -(state - 0.1 * t).pow(2).sum(-1)
    w = (logw - logw.logsumexp(0)).exp()
    picked = torch.multinomial(w[: 1 << 20], 4096, True)
    state = state + 0.001 * state[picked].mean(0)
    history.append((state, w))
    recorder.step()
mean = torch.stack([(s * w[:, None]).sum(0) for s, w in history])
mean.sum().item()
