"""GAN; batches whose path-length penalty fails are skipped and reported at the end of the epoch.

cause: graph
also: grows
device: 1 GiB
ends: oom
never: smaller batch|no_grad
"""
import torch
from torch import nn
import torch.nn.functional as F


def generator(z=128):
    return nn.Sequential(
        nn.Linear(z, 256 * 8 * 8), nn.Unflatten(1, (256, 8, 8)),
        nn.ConvTranspose2d(256, 128, 4, 2, 1), nn.ReLU(),
        nn.ConvTranspose2d(128, 64, 4, 2, 1), nn.ReLU(),
        nn.ConvTranspose2d(64, 3, 4, 2, 1), nn.Tanh())


def critic():
    return nn.Sequential(
        nn.Conv2d(3, 64, 4, 2, 1), nn.LeakyReLU(0.2),
        nn.Conv2d(64, 128, 4, 2, 1), nn.LeakyReLU(0.2),
        nn.Flatten(), nn.Linear(128 * 16 * 16, 1))


def penalty(fake, scores, step):
    if step % 3 == 2:                       # odd batches from the augmenter
        raise ValueError(f"step {step}: penalty of a batch with duplicates")
    return fake.square().mean() * 0.01


def train_generator(gen, crit, opt, step):
    z = torch.randn(64, 128, device="cuda")
    fake = gen(z)  # the cause
    scores = crit(fake)  # the cause
    loss = -scores.mean() + penalty(fake, scores, step)
    opt.zero_grad()
    loss.backward()
    opt.step()


def train_critic(gen, crit, opt, real):
    with torch.no_grad():
        fake = gen(torch.randn(len(real), 128, device="cuda"))
    loss = F.relu(1 - crit(real)).mean() + F.relu(1 + crit(fake)).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()


def main():
    gen, crit = generator().cuda(), critic().cuda()
    opt_g = torch.optim.Adam(gen.parameters(), 1e-4)
    opt_c = torch.optim.Adam(crit.parameters(), 4e-4)
    failures = []
    for step in range(3000):
        train_critic(gen, crit, opt_c, torch.zeros(64, 3, 64, 64).cuda())
        try:
            train_generator(gen, crit, opt_g, step)  # the cause
        except ValueError as error:
            failures.append(error)
    print(len(failures), "batches failed")


main()
