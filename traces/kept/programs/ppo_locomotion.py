"""Rollouts of many bodies with a small actor: what was seen, done and earned is kept in lists for a
horizon, then stacked and learned from."""

import recorder
import torch
from torch import nn

BODIES, SEEN, ACTS = 4096, 187, 12


def mlp(out):
    return nn.Sequential(
        nn.Linear(SEEN, 512), nn.ELU(), nn.Linear(512, 256), nn.ELU(), nn.Linear(256, out)
    ).cuda()


actor, critic, dynamics = mlp(ACTS), mlp(1), nn.Linear(SEEN + ACTS, SEEN).cuda()
optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=3e-4)
state = torch.zeros(BODIES, SEEN, device="cuda")
for _ in recorder.steps(4):
    seen, done, values, earned = [], [], [], []
    for _ in range(24):
        with torch.no_grad():
            mean = actor(state)
            act = mean + 0.3 * torch.randn_like(mean)
            seen.append(state)
            done.append(act)
            values.append(critic(state)[:, 0])
            nxt = (dynamics(torch.cat([state, act], 1)) + state).clamp(-5, 5)
            earned.append(-(nxt - state).square().mean(1) + nxt[:, 0])
            state = nxt
        recorder.step()
    gain, gains = 0, []
    for value, reward in zip(values[::-1], earned[::-1]):
        gain = reward + 0.97 * gain - value
        gains.append(gain)
    seen, done, gains = torch.cat(seen), torch.cat(done), torch.cat(gains[::-1])
    for _ in range(3):
        for part in torch.randperm(len(seen), device="cuda").chunk(6):
            s, a, g = seen[part], done[part], gains[part]
            log = -(actor(s) - a).square().sum(1)
            loss = -(log * g).mean() + (critic(s)[:, 0] - g).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
