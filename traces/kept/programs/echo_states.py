"""Reservoirs, twelve of them with different leaks, driven by a long signal; the states are kept
after washing out and a readout is fitted by ridge regression."""

import recorder
import torch

UNITS, SERIES = 1800, 48
within = torch.randn(12, UNITS, UNITS, device="cuda").mul_(0.02)
inward = torch.randn(12, 5, UNITS, device="cuda")
leak = torch.linspace(0.1, 0.9, 12, device="cuda")[:, None, None]
state = torch.zeros(12, SERIES, UNITS, device="cuda")
states, goals = [], []
with torch.no_grad():
    for t in recorder.steps(140):
        drive = recorder.blank(1, SERIES, 5, dtype=torch.float).expand(12, -1, -1)
        state = (1 - leak) * state + leak * (state @ within + drive @ inward).tanh()
        if t >= 30:
            states.append(state[:, :, ::2].clone())
            goals.append(drive[0])
        recorder.step()
    gram = sum(s.transpose(1, 2) @ s for s in states)
    right = sum(s.transpose(1, 2) @ g for s, g in zip(states, goals))
    (gram + 1e-3 * torch.eye(UNITS // 2, device="cuda")) @ right
