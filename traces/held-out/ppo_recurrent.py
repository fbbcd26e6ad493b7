"""Recurrent PPO: rollouts of many environments, then epochs over shuffled sequences."""

import random

import recorder
import torch
import torch.nn.functional as F
from torch import nn

rng = random.Random(5)
ENVS, HORIZON, ACTIONS = 64, 64, 6


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.eye = nn.Sequential(
            nn.Conv2d(3, 32, 8, 4),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, 2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(1024, 256),
            nn.ReLU(),
        )
        self.memory = nn.LSTM(256, 256)
        self.actor, self.critic = nn.Linear(256, ACTIONS), nn.Linear(256, 1)

    def forward(self, seen, state):
        t, b = seen.shape[:2]
        x = self.eye(seen.flatten(0, 1).float() / 255).view(t, b, -1)
        x, state = self.memory(x, state)
        return self.actor(x), self.critic(x).squeeze(-1), state


policy = Policy().cuda()
optimizer = torch.optim.Adam(policy.parameters(), lr=2.5e-4, eps=1e-5)
state = (torch.zeros(1, ENVS, 256).cuda(), torch.zeros(1, ENVS, 256).cuda())

for update in recorder.steps(6):
    seen, actions, logs, values, rewards = [], [], [], [], []
    first = tuple(s.clone() for s in state)
    with torch.no_grad():
        for t in range(HORIZON):
            frame = torch.zeros(1, ENVS, 3, 64, 64, dtype=torch.uint8).cuda()
            logits, value, state = policy(frame, state)
            action = torch.multinomial(logits[0].softmax(-1), 1).squeeze(1)
            log = logits[0].log_softmax(-1).gather(1, action[:, None]).squeeze(1)
            commands = action.cpu()
            seen.append(frame)
            actions.append(action)
            logs.append(log)
            values.append(value[0])
            rewards.append(torch.zeros(ENVS).cuda())
            alive = torch.tensor([0.0 if rng.random() < 0.01 else 1.0 for _ in range(ENVS)]).cuda()
            state = tuple(s * alive[None, :, None] for s in state)
        seen, actions, logs = torch.cat(seen), torch.stack(actions), torch.stack(logs)
        values, rewards = torch.stack(values), torch.stack(rewards)
        advantage, last = torch.zeros_like(rewards), torch.zeros(ENVS, device="cuda")
        for t in reversed(range(HORIZON - 1)):
            delta = rewards[t] + 0.99 * values[t + 1] - values[t]
            last = delta + 0.99 * 0.95 * last
            advantage[t] = last
        returns = advantage + values
    for epoch in range(3):
        order = torch.randperm(ENVS)
        for chosen in order.split(16):
            chosen = chosen.cuda()
            logits, value, _ = policy(
                seen[:, chosen], tuple(s[:, chosen].contiguous() for s in first)
            )
            new = logits.log_softmax(-1)
            log = new.gather(2, actions[:, chosen, None]).squeeze(2)
            ratio = (log - logs[:, chosen]).exp()
            a = advantage[:, chosen]
            a = (a - a.mean()) / (a.std() + 1e-8)
            gain = torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a).mean()
            entropy = -(new.exp() * new).sum(-1).mean()
            loss = -gain + 0.5 * F.mse_loss(value, returns[:, chosen]) - 0.01 * entropy
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()
    recorder.step()
