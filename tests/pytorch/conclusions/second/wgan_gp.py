"""WGAN-GP, two optimizers, images of doubling side: at the last side the critic does not fit.

cause: too_large
device: 12 GiB
ends: oom
never: no_grad|inference_mode|detach|retain_graph
"""

import torch
from torch import autograd, nn, optim

BATCH, CH, Z = 64, 64, 128


class Generator(nn.Module):
    def __init__(self, levels=6):
        super().__init__()
        self.start = nn.Linear(Z, CH * 8 * 8)
        self.ups = nn.ModuleList(nn.Conv2d(CH, CH, 3, padding=1) for _ in range(levels))
        self.rgb = nn.Conv2d(CH, 3, 1)
        self.resize = nn.Upsample(scale_factor=2)

    def forward(self, z, level):
        h = self.start(z).view(-1, CH, 8, 8)
        for conv in self.ups[:level]:
            h = torch.relu(conv(self.resize(h)))
        return torch.tanh(self.rgb(h))


class Critic(nn.Module):
    def __init__(self, levels=6):
        super().__init__()
        self.rgb = nn.Conv2d(3, CH, 1)
        self.downs = nn.ModuleList(nn.Conv2d(CH, CH, 4, 2, 1) for _ in range(levels))
        self.score = nn.Linear(CH * 8 * 8, 1)

    def forward(self, x, level):
        h = nn.functional.leaky_relu(self.rgb(x), 0.2)
        for conv in self.downs[:level]:
            h = nn.functional.leaky_relu(conv(h), 0.2)
        return self.score(h.flatten(1))


def gradient_penalty(D, real, fake, level):
    alpha = torch.rand(BATCH, 1, 1, 1, device="cuda")
    mixed = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    (g,) = autograd.grad(D(mixed, level).sum(), mixed, create_graph=True)
    return ((g.flatten(1).norm(2, dim=1) - 1) ** 2).mean()


G, D = Generator().cuda(), Critic().cuda()
opt_g, opt_d = (optim.Adam(m.parameters(), lr=1e-4, betas=(0.0, 0.9)) for m in (G, D))
for level in range(1, 7):
    side = 8 * 2**level
    for it in range(2):
        for _ in range(2):
            real = torch.rand(BATCH, 3, side, side, device="cuda")
            fake = G(torch.randn(BATCH, Z, device="cuda"), level).detach()
            d_loss = D(fake, level).mean() - D(real, level).mean()
            d_loss = d_loss + 10 * gradient_penalty(D, real, fake, level)
            opt_d.zero_grad()
            d_loss.backward()
            opt_d.step()
        g_loss = -D(G(torch.randn(BATCH, Z, device="cuda"), level), level).mean()
        opt_g.zero_grad()
        g_loss.backward()
        opt_g.step()
        print(f"side {side} it {it} d {d_loss.item():.2f} g {g_loss.item():.2f}", flush=True)
