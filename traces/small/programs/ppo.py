"""Reinforcement learning: PPO on pictures of 64 games at once. Steps of the games are kept in lists
and stacked, then learnt from in shuffled parts."""

import recorder
import torch
from torch import nn
from torch.nn import functional as F

GAMES, STEPS, ACTIONS = 64, 24, 15


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(4, 32, 8, 4),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, 2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * 7 * 7, 512),
            nn.ReLU(),
        )
        self.action, self.value = nn.Linear(512, ACTIONS), nn.Linear(512, 1)

    def forward(self, seen):
        x = self.body(seen.float() / 255)
        return self.action(x), self.value(x).squeeze(-1)


policy = Policy().cuda()
optimizer = torch.optim.Adam(policy.parameters(), lr=2.5e-4, eps=1e-5)
for _ in recorder.steps(6):
    seen, actions, chances, values, rewards = [], [], [], [], []
    for _ in range(STEPS):
        picture = recorder.blank(GAMES, 4, 84, 84, dtype=torch.uint8)
        with torch.no_grad():
            logits, value = policy(picture)
            action = logits.softmax(-1).add(1).multinomial(1).squeeze(-1) * 0
            chance = logits.log_softmax(-1).gather(1, action[:, None]).squeeze(1)
        action.cpu()
        for kept, new in zip(
            (seen, actions, chances, values, rewards),
            (picture, action, chance, value, torch.zeros(GAMES).cuda()),
        ):
            kept.append(new)
    advantages, last = [None] * STEPS, torch.zeros(GAMES, device="cuda")
    for index in reversed(range(STEPS)):
        later = values[index + 1] if index + 1 < STEPS else values[index]
        last = rewards[index] + 0.99 * later - values[index] + 0.95 * 0.99 * last
        advantages[index] = last
    seen, actions, chances, values, advantages = (
        torch.stack(part).flatten(0, 1) for part in (seen, actions, chances, values, advantages)
    )
    for _ in range(2):
        for part in torch.randperm(GAMES * STEPS).cuda().split(GAMES * STEPS // 4):
            logits, value = policy(seen[part])
            now = logits.log_softmax(-1)
            ratio = (now.gather(1, actions[part][:, None]).squeeze(1) - chances[part]).exp()
            gain = advantages[part]
            gain = (gain - gain.mean()) / (gain.std() + 1e-8)
            loss = -torch.min(ratio * gain, ratio.clamp(0.9, 1.1) * gain).mean()
            loss = loss + 0.5 * F.mse_loss(value, values[part] + advantages[part])
            loss = loss + 0.01 * (now.exp() * now).sum(-1).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()
    recorder.step()
