"""A world model dreams: from latent states it imagines trajectories, decodes each into pictures,
and keeps latents, rewards and pictures of the dream."""

import recorder
import torch
from torch import nn

DREAMS, DETER, STOCH = 910, 512, 1024
cell = nn.GRUCell(600, DETER).cuda()
enter = nn.Sequential(nn.Linear(STOCH + 6, 600), nn.ELU()).cuda()
prior = nn.Sequential(nn.Linear(DETER, 600), nn.ELU(), nn.Linear(600, STOCH)).cuda()
reward = nn.Sequential(nn.Linear(DETER + STOCH, 400), nn.ELU(), nn.Linear(400, 1)).cuda()
policy = nn.Sequential(nn.Linear(DETER + STOCH, 400), nn.ELU(), nn.Linear(400, 6)).cuda()
decoder = nn.Sequential(
    nn.Linear(DETER + STOCH, 1024),
    nn.Unflatten(1, (1024, 1, 1)),
    nn.ConvTranspose2d(1024, 128, 5, 2),
    nn.ReLU(),
    nn.ConvTranspose2d(128, 64, 5, 2),
    nn.ReLU(),
    nn.ConvTranspose2d(64, 32, 6, 2),
    nn.ReLU(),
    nn.ConvTranspose2d(32, 3, 6, 2),
).cuda()
h, z = torch.zeros(DREAMS, DETER, device="cuda"), torch.zeros(DREAMS, STOCH, device="cuda")
latents, rewards, pictures = [], [], []
with torch.no_grad():
    for _ in recorder.steps(64):
        both = torch.cat([h, z], 1)
        act = policy(both).tanh()
        h = cell(enter(torch.cat([z, act], 1)), h)
        logits = prior(h).view(DREAMS, 32, 32)
        z = (logits + torch.rand_like(logits)).softmax(-1).flatten(1)
        both = torch.cat([h, z], 1)
        latents.append(both)
        rewards.append(reward(both))
        pictures.append(decoder(both))
        recorder.step()
