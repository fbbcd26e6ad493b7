"""A toy chat server: decodes conversations with a KV cache that keeps every conversation.

cause: cache
also: grows
device: 1 GiB
ends: oom
never: smaller batch|fewer bits
"""

import os, random, time
import torch
import torch.nn as nn
import torch.nn.functional as F


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.head_dim = heads, dim // heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x, past):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, self.head_dim).transpose(1, 2)
                   for y in self.qkv(x).chunk(3, dim=-1))
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)  # the cause
        y = F.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        return self.out(y.transpose(1, 2).reshape(b, t, c)), (k, v)


class Decoder(nn.Module):
    def __init__(self, vocab=8000, dim=1024, layers=8, heads=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.attention = nn.ModuleList(Attention(dim, heads) for _ in range(layers))
        self.mlp = nn.ModuleList(nn.Sequential(nn.Linear(dim, 4 * dim), nn.SiLU(),
                                               nn.Linear(4 * dim, dim)) for _ in range(layers))
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens, cache):
        x, new = self.embed(tokens), []
        for i, (attention, mlp) in enumerate(zip(self.attention, self.mlp)):
            a, kv = attention(x, cache[i] if cache else None)
            x = x + a
            x = x + mlp(x)
            new.append(kv)
        return self.head(x[:, -1]), new


class Sessions:
    """The KV caches by conversation, so that a follow-up question needs no prefill."""

    def __init__(self, model):
        self.model, self.caches = model, {}

    @torch.inference_mode()
    def ask(self, user, prompt, answer_length):
        cache = self.caches.get(user)
        logits, cache = self.model(prompt, cache)  # the cause
        for _ in range(answer_length):
            token = logits.argmax(-1, keepdim=True)
            logits, cache = self.model(token, cache)  # the cause
        self.caches[user] = cache
        return token


def main():
    rng = random.Random(1)
    sessions = Sessions(Decoder().half().cuda().eval())
    for request in range(2000):
        user = f"user-{rng.randint(0, 400)}"
        prompt = torch.randint(0, 8000, (1, rng.randint(50, 400)), device="cuda")
        sessions.ask(user, prompt, rng.randint(4, 12))
        if request % 20 == 0:
            print(f"request {request}: {len(sessions.caches)} conversations", flush=True)
        time.sleep(float(os.environ.get("SLOW", "0")))


if __name__ == "__main__":
    main()
