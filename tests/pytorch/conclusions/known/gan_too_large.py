"""A generator and a discriminator, each with an optimizer; the batch is too large.

cause: too_large
device: 4 GiB
ends: oom
never: no_grad|inference_mode|retain_graph|\.item\(\)
"""

import torch
from torch import nn


def layers(width, count):
    return nn.Sequential(*[m for _ in range(count) for m in (nn.Linear(width, width), nn.GELU())])


generator, critic = layers(2048, 8).cuda(), layers(2048, 8).cuda()
one, two = torch.optim.Adam(generator.parameters()), torch.optim.Adam(critic.parameters())
for step in range(20):
    noise = torch.randn(12000, 2048, device="cuda")
    fake = generator(noise)
    loss = critic(fake.detach()).mean() + critic(torch.randn_like(noise)).mean()
    two.zero_grad()
    loss.backward()
    two.step()
    one.zero_grad()
    critic(fake).mean().backward()
    one.step()
