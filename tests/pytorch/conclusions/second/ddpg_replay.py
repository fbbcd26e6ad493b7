"""DDPG whose replay memory fills to the size that it was given and stays there.

cause: nothing
device: 6 GiB
ends: killed
never: no_grad|inference_mode|detach|maxlen|empty_cache|smaller batch|batch size
"""

import copy
import os
import random
import signal
from collections import deque

import torch
from torch import nn

OBS, ACT, ROLLOUT, KEEP = 1024, 32, 16384, 12
cuda = torch.device("cuda")


def mlp(i, o, *last):
    return nn.Sequential(nn.Linear(i, 512), nn.ReLU(), nn.Linear(512, o), *last).to(cuda)


class Agent:
    def __init__(self):
        self.actor, self.critic = mlp(OBS, ACT, nn.Tanh()), mlp(OBS + ACT, 1)
        self.slow_actor, self.slow_critic = copy.deepcopy((self.actor, self.critic))
        self.opt_a = torch.optim.Adam(self.actor.parameters(), 1e-4)
        self.opt_c = torch.optim.Adam(self.critic.parameters(), 1e-3)

    def update(self, s, a, r, s2):
        with torch.no_grad():
            y = r + 0.99 * self.slow_critic(torch.cat([s2, self.slow_actor(s2)], 1))
        loss_c = nn.functional.mse_loss(self.critic(torch.cat([s, a], 1)), y)
        self.opt_c.zero_grad()
        loss_c.backward()
        self.opt_c.step()
        loss_a = -self.critic(torch.cat([s, self.actor(s)], 1)).mean()
        self.opt_a.zero_grad()
        loss_a.backward()
        self.opt_a.step()
        with torch.no_grad():
            for slow, fast in ((self.slow_actor, self.actor), (self.slow_critic, self.critic)):
                for p, q in zip(slow.parameters(), fast.parameters(), strict=True):
                    p.lerp_(q, 0.005)


@torch.no_grad()
def play(actor):
    s = torch.randn(ROLLOUT, OBS, device=cuda)
    a = (actor(s) + 0.1 * torch.randn(ROLLOUT, ACT, device=cuda)).clamp(-1, 1)
    return s, a, torch.randn(ROLLOUT, 1, device=cuda), torch.randn(ROLLOUT, OBS, device=cuda)


agent, memory = Agent(), deque(maxlen=KEEP)
for episode in range(45):
    memory.append(play(agent.actor))
    for _ in range(4):
        s, a, r, s2 = random.choice(memory)
        rows = torch.randint(0, ROLLOUT, (2048,), device=cuda)
        agent.update(s[rows], a[rows], r[rows], s2[rows])
    if episode % 5 == 0:
        print("episode", episode, "memory", len(memory), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
