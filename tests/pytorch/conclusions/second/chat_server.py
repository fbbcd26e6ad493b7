"""A server that answers one prompt after another, its keys and values growing by each token.

cause: too_large
device: 6 GiB
ends: oom
never: no_grad|inference_mode|detach|leak|optimizer|backward
"""

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_a, self.ln_b = nn.LayerNorm(width), nn.LayerNorm(width)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width) for _ in range(4))
        up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(up, nn.SiLU(), down)

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x, past):
        h = self.ln_a(x)
        q, k, v = self.split(self.wq(h)), self.split(self.wk(h)), self.split(self.wv(h))
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        x = x + self.wo(a.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_b(x)), (k, v)


class Server:
    def __init__(self, layers=12, width=2048, heads=16, vocab=32000):
        with torch.device("cuda"):
            self.embed = nn.Embedding(vocab, width).half()
            self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers)).half().eval()

    @torch.inference_mode()
    def answer(self, prompts, new_tokens):
        past, tokens, answer = [None] * len(self.blocks), prompts, []
        for _ in range(new_tokens):
            x = self.embed(tokens)
            for i, block in enumerate(self.blocks):
                x, past[i] = block(x, past[i])
            tokens = (x[:, -1:] @ self.embed.weight.T).argmax(-1)
            answer.append(tokens)
        return torch.cat(answer, dim=1).cpu()


server = Server()
requests = [(2, 300), (8, 200), (1, 900), (4, 500), (8, 400), (2, 1200), (48, 600)]
for number, (users, length) in enumerate(requests):
    prompts = torch.randint(0, 32000, (users, length), device="cuda")
    text = server.answer(prompts, new_tokens=25 if users < 48 else 400)
    print("request", number, "users", users, "tokens", tuple(text.shape), flush=True)
