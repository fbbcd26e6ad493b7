"""A GAN with two optimizers queues pictures to be drawn at the end, each held by its closure.

cause: grows
device: 3 GiB
ends: oom
never: no_grad|inference_mode|smaller (batch|model)
"""
import torch
import torch.nn as nn

torch.manual_seed(0)
latent = 128


def up(a, b):
    return nn.Sequential(nn.ConvTranspose2d(a, b, 4, 2, 1), nn.BatchNorm2d(b), nn.ReLU(True))


def down(a, b):
    return nn.Sequential(nn.Conv2d(a, b, 4, 2, 1), nn.LeakyReLU(0.2, True))


G = nn.Sequential(
    nn.ConvTranspose2d(latent, 512, 4), nn.BatchNorm2d(512), nn.ReLU(True),
    up(512, 256), up(256, 128), up(128, 64), up(64, 32),
    nn.ConvTranspose2d(32, 3, 4, 2, 1), nn.Tanh(),
).cuda()
D = nn.Sequential(
    down(3, 32), down(32, 64), down(64, 128), down(128, 256), down(256, 512),
    nn.Conv2d(512, 1, 4), nn.Flatten(0),
).cuda()
opt_g = torch.optim.Adam(G.parameters(), 2e-4, betas=(0.5, 0.999))
opt_d = torch.optim.Adam(D.parameters(), 2e-4, betas=(0.5, 0.999))
bce = nn.BCEWithLogitsLoss()
gallery = []


def save_grid(name, pictures):
    with open(f"/tmp/{name}.raw", "wb") as file:
        file.write(bytes(pictures.clamp(0, 1).mul(255).byte().cpu().flatten().tolist()))


def one_step(real):
    ones, zeros = torch.ones(len(real)).cuda(), torch.zeros(len(real)).cuda()
    fake = G(torch.randn(len(real), latent, 1, 1, device="cuda"))  # the cause

    opt_d.zero_grad()
    loss_d = bce(D(real), ones) + bce(D(fake.detach()), zeros)
    loss_d.backward()
    opt_d.step()

    opt_g.zero_grad()
    loss_g = bce(D(fake), ones)
    loss_g.backward()
    opt_g.step()
    return fake.detach(), loss_d.item(), loss_g.item()


for it in range(2000):
    fake, d, g = one_step(torch.zeros(256, 3, 128, 128, device="cuda"))
    gallery.append(lambda it=it, fake=fake: save_grid(f"gan-{it}", fake))  # the cause
    if it % 5 == 0:
        print(f"{it:5d}  D {d:.3f}  G {g:.3f}", flush=True)
for draw in gallery:
    draw()
