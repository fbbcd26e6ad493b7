"""Tracking of people in a video: a gallery of the latest appearances of each track, states of a
Kalman filter for all times."""

import recorder
import torch
from torch import nn
from torch.nn import functional as F

net = nn.Sequential(
    nn.Conv2d(3, 32, 5, 2, 2),
    nn.ReLU(),
    nn.Conv2d(32, 64, 3, 2, 1),
    nn.ReLU(),
    nn.Conv2d(64, 128, 3, 2, 1),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(128 * 128, 512),
).cuda()
TRACKS = 64
gallery = [[] for _ in range(TRACKS)]
mean, spread = (
    torch.zeros(TRACKS, 8, device="cuda"),
    torch.eye(8, device="cuda").repeat(TRACKS, 1, 1),
)
move = torch.eye(8, device="cuda") + torch.diag(torch.ones(4, device="cuda"), 4)
look, states, maps = torch.eye(4, 8, device="cuda"), [], []
with torch.no_grad():
    for _ in recorder.steps(110):
        count = recorder.draw.randrange(12, 60)
        looks = F.normalize(net(recorder.blank(count, 3, 128, 64, dtype=torch.float)), dim=1)
        mean, spread = mean @ move.t(), move @ spread @ move.t() + 0.01
        noise = look @ spread @ look.t() + torch.eye(4, device="cuda")
        costs = [
            1 - (torch.stack(g) @ looks.t()).amax(0) if g else torch.ones(count, device="cuda")
            for g in gallery
        ]
        maps.append(torch.stack(costs))
        for one, track in zip(looks, recorder.draw.sample(range(TRACKS), count)):
            gallery[track] = [*gallery[track], one.clone()][-60:]
        gain = spread @ look.t() @ noise.transpose(1, 2)
        mean = mean + (gain @ torch.zeros(TRACKS, 4, 1, device="cuda"))[..., 0]
        spread = spread - gain @ look @ spread
        states.append((mean, spread, gain))
        recorder.step()
