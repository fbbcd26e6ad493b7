"""A Wasserstein GAN with gradient penalty, five steps of the critic for each of the generator."""

import recorder
import torch
from torch import autograd, nn

LATENT, WIDTH, BATCH = 128, 64, 32


def up(a, b):
    return [nn.ConvTranspose2d(a, b, 4, 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU(True)]


def down(a, b):
    return [nn.Conv2d(a, b, 4, 2, 1), nn.InstanceNorm2d(b, affine=True), nn.LeakyReLU(0.2)]


generator = nn.Sequential(
    nn.ConvTranspose2d(LATENT, WIDTH * 8, 4, 1, 0, bias=False),
    nn.BatchNorm2d(WIDTH * 8),
    nn.ReLU(True),
    *up(WIDTH * 8, WIDTH * 4),
    *up(WIDTH * 4, WIDTH * 2),
    *up(WIDTH * 2, WIDTH),
    nn.ConvTranspose2d(WIDTH, 3, 4, 2, 1),
    nn.Tanh(),
).cuda()
critic = nn.Sequential(
    nn.Conv2d(3, WIDTH, 4, 2, 1),
    nn.LeakyReLU(0.2),
    *down(WIDTH, WIDTH * 2),
    *down(WIDTH * 2, WIDTH * 4),
    *down(WIDTH * 4, WIDTH * 8),
    nn.Conv2d(WIDTH * 8, 1, 4),
).cuda()
opt_g = torch.optim.Adam(generator.parameters(), lr=1e-4, betas=(0.0, 0.9))
opt_c = torch.optim.Adam(critic.parameters(), lr=1e-4, betas=(0.0, 0.9))
fixed = torch.randn(64, LATENT, 1, 1, device="cuda")
samples = []


def penalty(real, fake):
    alpha = torch.rand(real.shape[0], 1, 1, 1, device="cuda")
    mixed = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    scores = critic(mixed)
    grads = autograd.grad(
        scores, mixed, torch.ones_like(scores), create_graph=True, retain_graph=True
    )[0]
    return ((grads.flatten(1).norm(2, dim=1) - 1) ** 2).mean()


for step in recorder.steps(12):
    for p in critic.parameters():
        p.requires_grad_(True)
    for _ in range(5):
        real = torch.zeros(BATCH, 3, 64, 64).cuda()
        with torch.no_grad():
            fake = generator(torch.randn(BATCH, LATENT, 1, 1, device="cuda"))
        loss_c = critic(fake).mean() - critic(real).mean() + 10 * penalty(real, fake)
        opt_c.zero_grad()
        loss_c.backward()
        opt_c.step()
    for p in critic.parameters():
        p.requires_grad_(False)
    loss_g = -critic(generator(torch.randn(BATCH, LATENT, 1, 1, device="cuda"))).mean()
    opt_g.zero_grad()
    loss_g.backward()
    opt_g.step()
    if step % 4 == 0:
        with torch.no_grad():
            samples.append(generator(fixed).cpu())
    recorder.step()
