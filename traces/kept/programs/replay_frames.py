"""Q-learning on pictures: a deque of transitions on the device, old ones leave when it is full; a
batch is stacked out of it now and then."""

import collections

import recorder
import torch
from torch import nn


def network():
    return nn.Sequential(
        nn.Conv2d(4, 32, 8, 4),
        nn.ReLU(),
        nn.Conv2d(32, 64, 4, 2),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(3136, 512),
        nn.ReLU(),
        nn.Linear(512, 6),
    ).cuda()


online, target = network(), network()
optimizer = torch.optim.Adam(online.parameters(), lr=1e-4)
memory = collections.deque(maxlen=110)
games = 48
frames = torch.zeros(games, 4, 84, 84, dtype=torch.uint8, device="cuda")
for step in recorder.steps(200):
    with torch.no_grad():
        act = online(frames.float() / 255).argmax(1)
    new = recorder.blank(games, 1, 84, 84, dtype=torch.uint8)
    after = torch.cat([frames[:, 1:], new], 1)
    memory.append((frames, act, torch.zeros(games, device="cuda"), after))
    frames = after
    if step % 4 == 3:
        picked = [recorder.draw.choice(memory) for _ in range(3)]
        s, a, r, n = (torch.cat(parts) for parts in zip(*picked))
        with torch.no_grad():
            goal = r + 0.99 * target(n.float() / 255).amax(1)
        loss = nn.functional.smooth_l1_loss(
            online(s.float() / 255).gather(1, a[:, None])[:, 0], goal
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if step % 60 == 59:
        target.load_state_dict(online.state_dict())
    recorder.step()
