"""A particle filter for a tracked fleet; the particles, weights and ancestors of all times are kept
for smoothing backwards, which makes trajectories of them."""

import recorder
import torch

TRACKS, PARTICLES, STATE = 710, 1500, 9
motion = torch.eye(STATE, device="cuda")
x = torch.randn(TRACKS, PARTICLES, STATE, device="cuda")
history, weights, parents = [], [], []
with torch.no_grad():
    for _ in recorder.steps(85):
        seen = recorder.blank(TRACKS, 1, 3, dtype=torch.float)
        x = x @ motion + 0.1 * torch.randn_like(x)
        x[..., 6:] += 0.01 * torch.randn_like(x[..., 6:]).cumsum(1).clamp(-1, 1)
        away = (x[..., :3] - seen).square().sum(-1)
        log = -0.5 * away - 0.1 * (x[..., 3:6].norm(dim=-1) - 1).square()
        weight = log.softmax(1)
        grid = (
            torch.arange(PARTICLES, device="cuda") + torch.rand(TRACKS, 1, device="cuda")
        ) / PARTICLES
        parent = torch.searchsorted(weight.cumsum(1), grid).clamp(0, 0)
        history.append(x)
        weights.append(weight)
        parents.append(parent)
        x = x.gather(1, parent[..., None].expand(-1, -1, STATE))
        recorder.step()
    back, path = parents[-1], []
    for x, parent in zip(history[::-1], parents[::-1]):
        path.append(x.gather(1, back[..., None].expand(-1, -1, STATE)).mean(1))
        back = parent.gather(1, back)
