"""A decoder with the parts of Llama, for the programs that train one in several ways."""

import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )

    def forward(self, x, turns):
        batch, length, width = x.shape
        query, key, value = (
            part(x).view(batch, length, self.heads, -1).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        query, key = turned(query, turns), turned(key, turns)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


def turned(x, turns):
    """Rotary positions."""
    cosine, sine = turns
    one, other = x.chunk(2, -1)
    return torch.cat([one * cosine - other * sine, other * cosine + one * sine], -1).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, width, heads, inner):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads)
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x, turns):
        x = x + self.attention(self.norm1(x), turns)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, layers=8, width=1024, heads=16, inner=2816, words=32_000):
        super().__init__()
        self.angles = 10_000 ** (-torch.arange(0, width // heads, 2) / (width // heads))
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width, heads, inner) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.output = nn.Linear(width, words, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        angles = torch.arange(tokens.shape[1], device=x.device)[:, None] * self.angles.to(x.device)
        turns = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, turns)
        return self.output(self.norm(x))


def loss_of(model, tokens):
    """Of the next token."""
    said = model(tokens)
    return F.cross_entropy(said[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
