"""Ragged caches: a server that answers up to 24 conversations together. The cache of each grows by
parts of 64 tokens and goes when the conversation ends; a new one's prompt is read alone."""

import recorder
import torch
from torch import nn
from torch.nn import functional as F

WIDTH, DEPTH, HEADS, SHARED, SIZE, PART = 1024, 12, 16, 4, 64, 64


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * SHARED * SIZE)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x, talks, caches):
        """`x` has the new tokens of all `talks`, one after the other."""
        h = self.norm1(x)
        q, kv, mixed, start = self.q(h), self.kv(h), [], 0
        for talk, cache in zip(talks, caches):
            end = start + talk.new
            cache[:, :, talk.length : talk.length + talk.new] = (
                kv[start:end].view(talk.new, 2, SHARED, SIZE).permute(1, 2, 0, 3)
            )
            k, v = cache[:, :, : talk.length + talk.new]
            k, v = (part.repeat_interleave(HEADS // SHARED, 0)[None] for part in (k, v))
            own = q[start:end].view(1, talk.new, HEADS, SIZE).transpose(1, 2)
            mixed.append(F.scaled_dot_product_attention(own, k, v).transpose(1, 2).flatten(2)[0])
            start = end
        x = x + self.out(torch.cat(mixed))
        return x + self.mlp(self.norm2(x))


class Talk:
    def __init__(self):
        self.new, self.length = recorder.draw.randrange(20, 1500), 0
        self.left = recorder.draw.randrange(5, 60)
        self.caches = [None] * DEPTH

    def make_room(self):
        whole = -(-(self.length + self.new) // PART) * PART
        for index, cache in enumerate(self.caches):
            if cache is None or cache.shape[2] < whole:
                grown = torch.empty(2, SHARED, whole, SIZE, dtype=torch.half, device="cuda")
                if cache is not None:
                    grown[:, :, : cache.shape[2]] = cache
                self.caches[index] = grown


layers = nn.ModuleList([Layer() for _ in range(DEPTH)]).half().cuda()
words = nn.Embedding(50000, WIDTH).half().cuda()


@torch.inference_mode()
def turn(talks):
    for talk in talks:
        talk.make_room()
    x = words(recorder.blank(sum(talk.new for talk in talks)))
    for index, layer in enumerate(layers):
        x = layer(x, talks, [talk.caches[index] for talk in talks])
    F.linear(x[-len(talks) :], words.weight).argmax(-1).cpu()
    for talk in talks:
        talk.length += talk.new
        talk.new, talk.left = 1, talk.left - 1


talks = []
for index in recorder.steps(12):
    # Of a burst of requests each is read alone.
    for _ in range(min(24 - len(talks), recorder.draw.randint(0, 4))):
        talks.append(Talk())
        turn(talks[-1:])
    turn(talks) if talks else None
    talks = [talk for talk in talks if talk.left > 0]
    for talk in talks:
        talk.left -= 8
    recorder.step()
