"""Deep Q-learning from pictures: the replay memory is a list of batches on the device."""

import recorder
import torch
from torch import nn
from torch.nn import functional as F


def make():
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


q, target = make(), make()
opt = torch.optim.RMSprop(q.parameters(), lr=1e-4)
memory = []
for t in recorder.steps(120):
    frames = torch.randint(255, (96, 4, 84, 84), dtype=torch.uint8, device="cuda")
    with torch.no_grad():
        act = q(frames.float() / 255).argmax(-1)
    memory.append((frames, act, torch.randn(96, device="cuda")))
    if len(memory) > 100:
        memory.pop(0)
    if t > 10:
        pick = [memory[recorder.draw.randrange(len(memory))] for _ in range(4)]
        s = torch.cat([p[0] for p in pick]).float() / 255
        a = torch.cat([p[1] for p in pick])
        r = torch.cat([p[2] for p in pick])
        with torch.no_grad():
            y = r + 0.99 * target(s).max(-1).values
        loss = F.smooth_l1_loss(q(s).gather(1, a[:, None]).squeeze(1), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    recorder.step()
