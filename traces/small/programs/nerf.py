"""Rendering, training: a radiance field from rays, a coarse and a fine network, and a picture
rendered in parts in between."""

import recorder
import torch
from torch import nn
from torch.nn import functional as F


class Field(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.first = nn.ModuleList(
            [nn.Linear(63 if index == 0 else width, width) for index in range(4)]
        )
        self.later = nn.ModuleList(
            [nn.Linear(width + 63 if index == 0 else width, width) for index in range(4)]
        )
        self.density, self.middle = nn.Linear(width, 1), nn.Linear(width, width)
        self.colour = nn.Sequential(nn.Linear(width + 27, 128), nn.ReLU(), nn.Linear(128, 3))

    def forward(self, places, directions):
        def waves(x, count):
            scaled = [f(x * 2**power) for power in range(count) for f in (torch.sin, torch.cos)]
            return torch.cat([x, *scaled], -1)

        x = at = waves(places, 10)
        for layer in self.first:
            x = F.relu(layer(x))
        x = torch.cat([x, at], -1)
        for layer in self.later:
            x = F.relu(layer(x))
        seen = torch.cat([self.middle(x), waves(directions, 4)], -1)
        return F.relu(self.density(x)).squeeze(-1), self.colour(seen).sigmoid()


def render(field, start, direction, depths):
    places = start[:, None] + direction[:, None] * depths[..., None]
    density, colour = field(places, direction[:, None].expand_as(places))
    clear = torch.exp(-density * F.pad(depths.diff(), (0, 1), value=1e10))
    weights = (1 - clear) * torch.cumprod(F.pad(clear[:, :-1], (1, 0), value=1.0), -1)
    return (weights[..., None] * colour).sum(1), weights


def both(start, direction):
    depths = torch.linspace(2, 6, 64, device="cuda").expand(len(start), 64)
    depths = depths + torch.rand_like(depths) * 4 / 64
    coarse, weights = render(models[0], start, direction, depths)
    chosen = torch.searchsorted(
        weights.detach().cumsum(-1), torch.rand(len(start), 64, device="cuda")
    )
    more = depths.gather(1, chosen.clamp(0, 63) * 0)
    fine, _ = render(models[1], start, direction, torch.cat([depths, more], -1).sort(-1)[0])
    return coarse, fine


models = nn.ModuleList([Field(), Field()]).cuda()
optimizer = torch.optim.Adam(models.parameters(), lr=5e-4)
pictures = torch.zeros(40, 200, 200, 3, device="cuda")
for index in recorder.steps(8):
    chosen = recorder.blank(1024, high=40 * 200 * 200)
    start, direction = torch.zeros(1024, 3).cuda(), torch.zeros(1024, 3).cuda()
    coarse, fine = both(start, direction)
    wanted = pictures.view(-1, 3)[chosen]
    loss = F.mse_loss(coarse, wanted) + F.mse_loss(fine, wanted)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if index == 4:
        with torch.no_grad():
            rays = torch.zeros(2, 100 * 90, 3, device="cuda")
            parts = [both(*part.unbind())[1] for part in rays.split(2000, 1)]
            torch.cat(parts).cpu()
    recorder.step()
