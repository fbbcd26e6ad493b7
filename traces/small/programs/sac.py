"""Reinforcement learning: soft actor-critic on small networks, a buffer of what was seen on the
device, a step of the world and a step of learning in turn."""

import copy

import recorder
import torch
from torch import nn
from torch.nn import functional as F

SEEN, ACTIONS, ROOM = 76, 17, 120_000


def network(inside, outside, width=256):
    return nn.Sequential(
        nn.Linear(inside, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, outside),
    ).cuda()


actor = network(SEEN, 2 * ACTIONS)
critics = nn.ModuleList([network(SEEN + ACTIONS, 1) for _ in range(2)])
targets = copy.deepcopy(critics).requires_grad_(False)
temperature = torch.zeros(1, device="cuda", requires_grad=True)
optimizers = [
    torch.optim.Adam(weights, lr=3e-4)
    for weights in (actor.parameters(), critics.parameters(), [temperature])
]
buffer = {
    name: torch.zeros(ROOM, size, device="cuda")
    for name, size in (("seen", SEEN), ("action", ACTIONS), ("reward", 1), ("next", SEEN))
}


def act(seen):
    mean, spread = actor(seen).chunk(2, -1)
    normal = torch.distributions.Normal(mean, spread.clamp(-5, 2).exp(), validate_args=False)
    raw = normal.rsample()
    action = raw.tanh()
    chance = normal.log_prob(raw) - (1 - action.pow(2) + 1e-6).log()
    return action, chance.sum(-1, keepdim=True)


def value(models, seen, action):
    both = torch.cat([seen, action], -1)
    return torch.min(models[0](both), models[1](both))


def minimise(loss, optimizer):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


for index in recorder.steps(72):
    with torch.no_grad():
        act(torch.zeros(1, SEEN).cuda())[0].cpu()
    for name, kept in buffer.items():
        kept[index] = torch.zeros(kept.shape[1]).cuda()
    chosen = torch.randint(ROOM, (256,), device="cuda")
    seen, action, reward, later = (kept[chosen] for kept in buffer.values())
    with torch.no_grad():
        next_action, chance = act(later)
        best = value(targets, later, next_action) - temperature.exp() * chance
        wanted = reward + 0.99 * best
    both = torch.cat([seen, action], -1)
    minimise(sum(F.mse_loss(critic(both), wanted) for critic in critics), optimizers[1])
    action, chance = act(seen)
    minimise((temperature.exp().detach() * chance - value(critics, seen, action)).mean(),
             optimizers[0])
    minimise(-(temperature * (chance.detach() - ACTIONS)).mean(), optimizers[2])
    with torch.no_grad():
        for old, new in zip(targets.parameters(), critics.parameters()):
            old.lerp_(new, 0.005)
    if index % 12 == 11:
        recorder.step()
