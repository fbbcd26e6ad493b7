"""A radiance field: rays marched through coarse and fine networks, then whole views rendered by
chunks."""

import random

import recorder
import torch
import torch.nn.functional as F
from torch import nn

rng = random.Random(19)


def encode(x, n):
    f = 2.0 ** torch.arange(n, device=x.device)
    y = (x[..., None] * f).flatten(-2)
    return torch.cat([x, y.sin(), y.cos()], -1)


class Field(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.a = nn.Sequential(
            nn.Linear(63, width),
            nn.ReLU(),
            *[m for _ in range(3) for m in (nn.Linear(width, width), nn.ReLU())],
        )
        self.b = nn.Sequential(
            nn.Linear(63 + width, width),
            nn.ReLU(),
            *[m for _ in range(3) for m in (nn.Linear(width, width), nn.ReLU())],
        )
        self.sigma, self.feature = nn.Linear(width, 1), nn.Linear(width, width)
        self.colour = nn.Sequential(
            nn.Linear(width + 27, width // 2), nn.ReLU(), nn.Linear(width // 2, 3), nn.Sigmoid()
        )

    def forward(self, points, way):
        x, d = encode(points, 10), encode(way, 4)
        h = self.b(torch.cat([self.a(x), x], -1))
        return self.colour(
            torch.cat([self.feature(h), d[:, None].expand(-1, x.shape[1], -1)], -1)
        ), F.relu(self.sigma(h))


def march(rays, field, t):
    start, way = rays.split(3, -1)
    colour, sigma = field(start[:, None] + way[:, None] * t[..., None], F.normalize(way, dim=-1))
    gap = torch.cat([t[:, 1:] - t[:, :-1], torch.full_like(t[:, :1], 1e10)], 1)
    alpha = 1 - torch.exp(-sigma.squeeze(-1) * gap)
    through = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], 1), 1)[
        :, :-1
    ]
    weights = alpha * through
    return (weights[..., None] * colour).sum(1), weights


def render(rays, coarse, fine, near=2.0, far=6.0, n=64, m=128):
    t = torch.linspace(near, far, n, device=rays.device).expand(len(rays), n)
    t = t + torch.rand_like(t) * (far - near) / n
    first, weights = march(rays, coarse, t)
    pdf = weights.detach()[:, 1:-1] + 1e-5
    cdf = torch.cat(
        [torch.zeros_like(pdf[:, :1]), (pdf / pdf.sum(-1, keepdim=True)).cumsum(-1)], -1
    )
    u = torch.rand(len(rays), m, device=rays.device)
    index = torch.searchsorted(cdf, u, right=True).clamp(1, n - 2)
    more = t.gather(1, index)
    t, _ = torch.cat([t, more], 1).sort(1)
    return first, march(rays, fine, t)[0]


coarse, fine = Field().cuda(), Field().cuda()
optimizer = torch.optim.Adam([*coarse.parameters(), *fine.parameters()], lr=5e-4)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
rays, colours = torch.zeros(60, 200, 200, 6).cuda(), torch.zeros(60, 200, 200, 3).cuda()
rays, colours = rays.view(-1, 6), colours.view(-1, 3)

for step in recorder.steps(12):
    chosen = torch.randint(len(rays), (1024,)).cuda()
    first, second = render(rays[chosen], coarse, fine)
    loss = F.mse_loss(first, colours[chosen]) + F.mse_loss(second, colours[chosen])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    if step % 6 == 5:
        with torch.no_grad():
            view = rays[:20_000]
            picture = torch.cat([render(part, coarse, fine)[1] for part in view.split(2048)])
            psnr = -10 * F.mse_loss(picture, colours[:20_000]).log10()
            picture = picture.cpu()
    recorder.step()
