"""A DQN agent fills its replay buffer on the GPU, as meant, up to the capacity that it may have.

cause: nothing
device: 6 GiB
ends: killed
never: no_grad|inference_mode|detach|leak|smaller
"""
import os
import random
import signal
from collections import deque, namedtuple

import torch
import torch.nn as nn
import torch.nn.functional as F

Transition = namedtuple("Transition", "state action reward following")


class ReplayMemory:
    def __init__(self, capacity):
        self.memory = deque([], maxlen=capacity)

    def push(self, *args):
        self.memory.append(Transition(*args))

    def sample(self, n):
        return Transition(*(torch.cat(x) for x in zip(*random.sample(self.memory, n))))

    def __len__(self):
        return len(self.memory)


def q_network():
    return nn.Sequential(
        nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Flatten(),
        nn.Linear(64 * 9 * 9, 512), nn.ReLU(), nn.Linear(512, 6),
    ).cuda()


def observe():  # 64 copies of the game, each a picture of four frames
    return torch.zeros(64, 4, 84, 84, device="cuda")


policy, target = q_network(), q_network()
target.load_state_dict(policy.state_dict())
optimizer = torch.optim.Adam(policy.parameters(), lr=2.5e-4)
memory = ReplayMemory(250)
state = observe()
for t in range(600):
    with torch.no_grad():
        action = policy(state).argmax(1)
    reward, following = torch.zeros(64, device="cuda"), observe()
    memory.push(state, action, reward, following)
    state = following
    if len(memory) < 32:
        continue
    batch = memory.sample(4)
    q = policy(batch.state).gather(1, batch.action[:, None]).squeeze(1)
    with torch.no_grad():
        goal = batch.reward + 0.99 * target(batch.following).max(1).values
    loss = F.smooth_l1_loss(q, goal)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if t % 100 == 0:
        target.load_state_dict(policy.state_dict())
        print(t, len(memory), loss.item(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
