"""A decoder that streams text with a cache of keys and values which grows by concatenation; the
hidden states of each token are kept for a value head."""

import recorder
import torch
from torch import nn
from torch.nn import functional as F

WIDTH, LAYERS, HEADS = 1280, 10, 20


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, cache):
        q, k, v = (
            self.qkv(F.layer_norm(x, (WIDTH,))).unflatten(-1, (3, HEADS, 64)).permute(2, 0, 3, 1, 4)
        )
        if cache is not None:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=cache is None)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(F.layer_norm(x, (WIDTH,))))), (k, v)


with torch.device("cuda"), torch.no_grad():
    blocks = nn.ModuleList([Block() for _ in range(LAYERS)]).half()
    embed = nn.Embedding(32_000, WIDTH).half()
with torch.inference_mode():
    states = []
    for request in range(2):
        count = (11, 7)[request]
        caches, x = [None] * LAYERS, embed(recorder.blank(count, (431, 702)[request], high=32_000))
        for _ in recorder.steps(75):
            for index, block in enumerate(blocks):
                x, caches[index] = block(x, caches[index])
            states.append(x)
            token = (
                (F.layer_norm(x[:, -1], (WIDTH,)) @ embed.weight.t()).float().softmax(-1).argmax(-1)
            )
            x = embed(token.clamp(0, 0))[:, None]
            recorder.step()
