"""Smoke in a box, semi-Lagrangian, pressure by Jacobi sweeps; density and velocity are kept at
every step for a film."""

import recorder
import torch
from torch.nn import functional as F

HEIGHT, WIDTH = 2003, 3011
grid = F.affine_grid(torch.eye(2, 3)[None], (1, 1, HEIGHT, WIDTH), align_corners=True).cuda()
kernel = torch.tensor([[0, 1.0, 0], [1, 0, 1], [0, 1, 0]])[None, None].cuda() / 4
velocity = torch.zeros(1, 2, HEIGHT, WIDTH, device="cuda")
density = torch.zeros(1, 1, HEIGHT, WIDTH, device="cuda")
film = []
with torch.no_grad():
    for _ in recorder.steps(60):
        back = grid - 0.01 * velocity.permute(0, 2, 3, 1)
        velocity = F.grid_sample(velocity, back, align_corners=True)
        density = F.grid_sample(density, back, align_corners=True)
        velocity = velocity + 0.1 * torch.cat([torch.zeros_like(density), density], 1)
        across, down = velocity[:, :1], velocity[:, 1:]
        divergence = (
            across.roll(-1, 3) - across.roll(1, 3) + down.roll(-1, 2) - down.roll(1, 2)
        ) / 2
        pressure = torch.zeros_like(density)
        for _ in range(20):
            pressure = F.conv2d(pressure, kernel, padding=1) - divergence / 4
        slope = torch.cat(
            [
                pressure.roll(-1, 3) - pressure.roll(1, 3),
                pressure.roll(-1, 2) - pressure.roll(1, 2),
            ],
            1,
        )
        velocity = velocity - slope / 2
        film.append((density, velocity.half()))
        recorder.step()
