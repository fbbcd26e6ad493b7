"""Training by reward: a policy that generates and is trained, and a reference that comes to the
device for its part of each step and leaves."""

import random

import torch
from torch.nn import functional as F

from gruyere._bench.programs import SEED, Block, Decoder, blank, loss_of

draw, width = random.Random(SEED), 1024


def model():
    with torch.device("meta"):
        made = Decoder([Block(width, 16, 2816) for _ in range(24)], width, 32000).to(torch.bfloat16)
    return made.to_empty(device="cpu")


@torch.no_grad()
def generate(length, count):
    caches = [None] * len(policy.layers)
    tokens = blank(8, length)
    for _ in range(count):
        x = policy.embedding(tokens)
        for index, layer in enumerate(policy.layers):
            x, caches[index] = layer.attend(x, caches[index])
            x = layer.mlp(x)
        policy.head(policy.norm(x[:, -1]))
        tokens = blank(8, 16)


policy, reference = model().cuda(), model()
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6)
for _ in range(12):
    length, count = draw.randrange(64, 256), draw.randrange(4, 16)
    generate(length, count)
    tokens = blank(8, length + 16 * count)
    reference.cuda()
    with torch.no_grad():
        wanted = torch.cat(
            [F.log_softmax(reference(part), -1).amax(-1) for part in tokens.split(2)]
        )
    reference.cpu()
    for part, target in zip(tokens.split(2), wanted.split(2)):
        loss = loss_of(policy(part), part) + target.float().mean()
        loss.backward()
        del loss
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    del tokens, wanted, part, target
