"""A cluster of stars, leapfrog in blocks of rows; positions and velocities of all steps are kept.
"""

import recorder
import torch

STARS, ROWS = 13_300, 1900
place, speed = torch.randn(2, STARS, 3, device="cuda")
mass = torch.full((STARS,), 1.0 / STARS, device="cuda")


def pull(place):
    parts = []
    for rows in place.split(ROWS):
        away = place[None] - rows[:, None]
        near = (away.square().sum(-1) + 1e-4).rsqrt()
        parts.append(((mass * near**3)[..., None] * away).sum(1))
    return torch.cat(parts)


path = []
with torch.no_grad():
    force = pull(place)
    for _ in recorder.steps(40):
        speed = speed + 0.005 * force
        place = place + 0.01 * speed
        force = pull(place)
        speed = speed + 0.005 * force
        path.append(torch.cat([place, speed], 1))
        recorder.step()
