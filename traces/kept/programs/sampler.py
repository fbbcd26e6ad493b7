"""Draws pictures by diffusion and keeps the prediction of every step, as a film."""

import recorder
import torch
from torch import nn
from torch.nn import functional as F

torch.set_grad_enabled(False)


class Net(nn.Module):
    def __init__(self, w=192):
        super().__init__()
        self.i = nn.Conv2d(4, w, 3, 1, 1)
        self.b = nn.ModuleList(
            [
                nn.Sequential(nn.GroupNorm(8, w), nn.SiLU(), nn.Conv2d(w, w, 3, 1, 1))
                for _ in range(8)
            ]
        )
        self.a = nn.MultiheadAttention(w, 4, batch_first=True)
        self.o = nn.Conv2d(w, 4, 3, 1, 1)

    def forward(self, x):
        x = self.i(x)
        for b in self.b:
            x = x + b(x)
        s = F.avg_pool2d(x, 4).flatten(2).transpose(1, 2)
        s = self.a(s, s, s, need_weights=False)[0]
        x = x + F.interpolate(
            s.transpose(1, 2).reshape(x.shape[0], -1, x.shape[2] // 4, x.shape[3] // 4),
            scale_factor=4,
        )
        return self.o(x)


net = Net().cuda()
for n in (40, 56):
    x = torch.randn(n, 4, 96, 96, device="cuda")
    film = []
    for t in recorder.steps(50):
        eps = net(torch.cat([x]))
        x0 = (x - 0.1 * eps).clamp(-3, 3)
        film.append(x0.to(torch.float16) if t % 2 else x0)
        x = x0 + 0.05 * torch.randn_like(x)
        recorder.step()
    film = torch.stack([f.float() for f in film[::5]])
    film.mean().item()
