"""Speculative decoding: a draft model proposes, the target checks; both caches are cut back to
what held."""

import random

import recorder
import torch
import torch.nn.functional as F
from torch import nn

rng = random.Random(55)
VOCAB = 32000


class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.o = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = (
            nn.Linear(dim, 4 * dim, bias=False),
            nn.Linear(4 * dim, dim, bias=False),
        )

    def forward(self, x, past):
        b, t, c = x.shape
        q, k, v = (
            z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.n1(x)).chunk(3, -1)
        )
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        mask = None
        if t > 1:
            mask = torch.ones(t, k.shape[2], dtype=torch.bool, device=x.device).tril(k.shape[2] - t)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.o(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.n2(x)))), (k, v)


class Model(nn.Module):
    def __init__(self, dim, heads, layers):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, dim), nn.Linear(dim, VOCAB, bias=False)
        self.layers = nn.ModuleList(Layer(dim, heads) for _ in range(layers))

    def start(self):
        self.past = [None] * len(self.layers)

    def cut(self, length):
        self.past = [
            (k[:, :, :length].contiguous(), v[:, :, :length].contiguous()) for k, v in self.past
        ]

    @torch.no_grad()
    def forward(self, tokens):
        x = self.embed(tokens)
        for i, layer in enumerate(self.layers):
            x, self.past[i] = layer(x, self.past[i])
        return F.softmax(self.head(x).float(), -1)


with torch.device("cuda"):
    target, draft = Model(1280, 20, 18).bfloat16(), Model(512, 8, 4).bfloat16()

for request in recorder.steps(8):
    prompt = torch.randint(VOCAB, (1, rng.randrange(100, 1200))).cuda()
    length = prompt.shape[1]
    target.start()
    draft.start()
    target(prompt)
    p = draft(prompt)
    last = p[:, -1].argmax(-1, keepdim=True)
    written = 0
    while written < 64:
        gamma = 5
        proposed, chances = [last], []
        for _ in range(gamma):
            q = draft(proposed[-1])
            chances.append(q[:, -1])
            proposed.append(torch.multinomial(q[:, -1] + 1e-9, 1))
        checked = target(torch.cat(proposed, 1))
        guess = torch.cat(proposed[1:], 1)
        ratio = checked[:, :-1].gather(2, guess[..., None]) / torch.stack(chances, 1).gather(
            2, guess[..., None]
        )
        accepted = (torch.rand_like(ratio) < ratio).long().cumprod(1).sum().cpu()
        held = min(gamma, int(rng.expovariate(0.4)))
        residual = (checked[:, held] - (chances[held] if held < gamma else 0)).clamp(min=0) + 1e-9
        last = torch.multinomial(residual, 1)
        length += held + 1
        written += held + 1
        target.cut(length)
        draft.cut(min(length, draft.past[0][0].shape[2]))
    recorder.step()
