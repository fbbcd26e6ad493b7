"""Chat turn by turn with a decoder in fp16: caches grow by concatenation, and a conversation ends
now and then."""

import random

import recorder
import torch
import torch.nn.functional as F
from torch import nn

rng = random.Random(314)
VOCAB, DIM, HEADS, KV, LAYERS, HIDDEN = 32000, 2048, 16, 8, 20, 5504
HEAD = DIM // HEADS


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.qkv = nn.Linear(DIM, (HEADS + 2 * KV) * HEAD, bias=False)
        self.o = nn.Linear(DIM, DIM, bias=False)
        self.gate_up, self.down = (
            nn.Linear(DIM, 2 * HIDDEN, bias=False),
            nn.Linear(HIDDEN, DIM, bias=False),
        )

    def forward(self, x, cache):
        b, t, _ = x.shape
        q, k, v = (
            self.qkv(self.n1(x)).view(b, t, -1, HEAD).transpose(1, 2).split((HEADS, KV, KV), 1)
        )
        if cache is not None:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        cache = (k, v)
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=t > 1 and t == k.shape[2], enable_gqa=True
        )
        x = x + self.o(y.transpose(1, 2).reshape(b, t, DIM))
        gate, up = self.gate_up(self.n2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up), cache


torch.set_default_dtype(torch.float16)
with torch.device("cuda"):
    embed = nn.Embedding(VOCAB, DIM)
    layers = nn.ModuleList(Layer() for _ in range(LAYERS))
    norm, head = nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)


@torch.inference_mode()
def run(tokens, cache):
    x = embed(tokens)
    for i, layer in enumerate(layers):
        x, cache[i] = layer(x, cache[i])
    return head(norm(x[:, -1:])), cache


@torch.inference_mode()
def sample(logits, temperature=0.8, top_p=0.9):
    p = torch.softmax(logits[:, -1].float() / temperature, -1)
    p, index = p.sort(descending=True)
    p = p.masked_fill(p.cumsum(-1) - p > top_p, 0.0) + 1e-9
    return index.gather(-1, torch.multinomial(p / p.sum(-1, keepdim=True), 1))


cache = [None] * LAYERS
for turn in recorder.steps(10):
    if turn and rng.random() < 0.25:
        cache = [None] * LAYERS
    prompt = torch.randint(VOCAB, (1, rng.randrange(30, 700))).cuda()
    logits, cache = run(prompt, cache)
    reply = []
    for _ in range(rng.randrange(20, 90)):
        token = sample(logits)
        reply.append(token)
        logits, cache = run(token, cache)
    words = torch.cat(reply, 1).cpu()
    recorder.step()
