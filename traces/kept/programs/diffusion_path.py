"""A diffusion sampler of small pictures that keeps the whole path: the noisy pictures and the
guesses of the clean one at every step, for a film."""

import recorder
import torch
from torch import nn


class Res(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.n, self.c1, self.c2 = (
            nn.GroupNorm(8, a),
            nn.Conv2d(a, b, 3, 1, 1),
            nn.Conv2d(b, b, 3, 1, 1),
        )
        self.t, self.skip = nn.Linear(256, b), nn.Conv2d(a, b, 1)

    def forward(self, x, t):
        y = self.c1(nn.functional.silu(self.n(x))) + self.t(t)[..., None, None]
        return self.c2(nn.functional.silu(y)) + self.skip(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, 256), nn.SiLU(), nn.Linear(256, 256))
        self.inward, self.out = nn.Conv2d(3, 64, 3, 1, 1), nn.Conv2d(64, 3, 3, 1, 1)
        self.d1, self.d2, self.mid = Res(64, 64), Res(64, 128), Res(128, 256)
        self.u2, self.u1 = Res(384, 128), Res(192, 64)

    def forward(self, x, t):
        t = self.time(t)
        a = self.d1(self.inward(x), t)
        b = self.d2(nn.functional.avg_pool2d(a, 2), t)
        y = self.mid(nn.functional.avg_pool2d(b, 2), t)
        y = self.u2(torch.cat([nn.functional.interpolate(y, scale_factor=2), b], 1), t)
        return self.out(self.u1(torch.cat([nn.functional.interpolate(y, scale_factor=2), a], 1), t))


net = Net().cuda().eval()
x, path = torch.randn(30, 3, 84, 84, device="cuda"), []
with torch.no_grad():
    for step in recorder.steps(100):
        noise = net(x, torch.full((30, 1), step / 100, device="cuda"))
        clean = (x - 0.3 * noise).clamp(-1, 1)
        path.append((x, clean))
        x = 0.98 * clean + 0.1 * noise + 0.02 * torch.randn_like(x)
        recorder.step()
