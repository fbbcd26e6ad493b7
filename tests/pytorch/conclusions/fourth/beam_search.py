"""Beam search with a KV cache that grows by concatenation, by design, up to 4096 tokens.

cause: too_large
also: grows
device: 512 MiB
ends: oom
never: \.item\(\)|requires_grad
"""
import torch
from torch import nn
import torch.nn.functional as F

BEAMS, DIM, HEADS, LAYERS = 16, 512, 8, 6


class DecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.proj = nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x, past):
        q, k, v = self.qkv(x).view(-1, 3, HEADS, DIM // HEADS).unbind(1)
        k, v = k[:, :, None], v[:, :, None]
        if past is not None:
            k = torch.cat([past[0], k], 2)
            v = torch.cat([past[1], v], 2)
        y = F.scaled_dot_product_attention(q[:, :, None], k, v)
        x = x + self.proj(y[:, :, 0].reshape(-1, DIM))
        return x + self.mlp(x), (k, v)


class Decoder(nn.Module):
    def __init__(self, vocab=8000):
        super().__init__()
        self.embed = nn.Embedding(vocab, DIM)
        self.layers = nn.ModuleList([DecoderLayer() for _ in range(LAYERS)])
        self.head = nn.Linear(DIM, vocab)

    def forward(self, token, cache):
        x = self.embed(token)
        new = []
        for layer, past in zip(self.layers, cache):
            x, kv = layer(x, past)
            new.append(kv)
        return self.head(x), new


@torch.no_grad()
def beam_search(model, batch, limit=4096):
    token = torch.zeros(batch * BEAMS, dtype=torch.long, device="cuda")
    cache = [None] * LAYERS
    score = torch.zeros(batch * BEAMS, device="cuda")
    for _ in range(limit):
        logits, cache = model(token, cache)
        best = (score[:, None] + logits.log_softmax(-1)).max(-1)
        score, token = best.values, best.indices
        order = torch.arange(batch * BEAMS, device="cuda")      # the beams that survive
        cache = [(k[order], v[order]) for k, v in cache]
    return token


beam_search(Decoder().cuda().eval(), batch=4)
