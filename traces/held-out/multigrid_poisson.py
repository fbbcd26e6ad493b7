"""Poisson's equation on a large grid: conjugate gradients with a multigrid V-cycle as
preconditioner."""

import recorder
import torch
import torch.nn.functional as F

laplace = torch.tensor([[0.0, -1, 0], [-1, 4, -1], [0, -1, 0]], device="cuda", dtype=torch.double)[
    None, None
]
full = (
    torch.tensor([[1.0, 2, 1], [2, 4, 2], [1, 2, 1]], device="cuda", dtype=torch.double)[None, None]
    / 16
)


def apply(u):
    p = F.pad(u, (1, 1, 1, 1))
    return 4 * u - p[..., :-2, 1:-1] - p[..., 2:, 1:-1] - p[..., 1:-1, :-2] - p[..., 1:-1, 2:]


def smooth(u, f, count):
    for _ in range(count):
        u = u + 0.8 * (f - apply(u)) / 4
    return u


def cycle(f):
    if f.shape[-1] <= 7:
        return smooth(torch.zeros_like(f), f, 20)
    u = smooth(torch.zeros_like(f), f, 2)
    p = F.pad(f - apply(u), (1, 1, 1, 1))
    r = p[..., :-2, :] + 2 * p[..., 1:-1, :] + p[..., 2:, :]
    r = (r[..., :-2] + 2 * r[..., 1:-1] + r[..., 2:]) / 16
    coarse = cycle(4 * r[..., 1::2, 1::2])
    fine = F.interpolate(
        F.pad(coarse, (1, 1, 1, 1)),
        size=(f.shape[-2] + 2, f.shape[-1] + 2),
        mode="bilinear",
        align_corners=True,
    )[..., 1:-1, 1:-1]
    return smooth(u + fine, f, 2)


def solve(f, iterations):
    x = torch.zeros_like(f)
    r = f.clone()
    z = cycle(r)
    p = z.clone()
    rz = (r * z).sum()
    history = [r.norm()]
    for _ in range(iterations):
        q = apply(p)
        alpha = rz / (p * q).sum()
        x += alpha * p
        r -= alpha * q
        z = cycle(r)
        following = (r * z).sum()
        p = z + following / rz * p
        rz = following
        history.append(r.norm())
    return x, torch.stack(history)


solutions = []
for step in recorder.steps(9):
    n = (511, 1023, 2047)[step % 3]
    grid = torch.linspace(0, 1, n + 2, dtype=torch.double, device="cuda")[1:-1]
    f = (
        torch.outer(torch.sin(3 * grid * (1 + step)), torch.cos(2 * grid))[None, None]
        / (n + 1) ** 2
    )
    u, history = solve(f, 8)
    print(n, history.tolist()[-1])
    if n == 2047:
        solutions.append(u.float())
    recorder.step()
