"""A decoder is loaded in fp16, quantised to int8 layer by layer, then serves batches of prompts."""

import random

import recorder
import torch
import torch.nn.functional as F
from torch import nn

rng = random.Random(88)
DIM, HEADS, LAYERS, VOCAB = 1280, 20, 24, 50257


class Int8Linear(nn.Module):
    @torch.no_grad()
    def __init__(self, linear):
        super().__init__()
        w = linear.weight.float()
        scale = w.abs().amax(1, keepdim=True).clamp(min=1e-8) / 127
        self.register_buffer("weight", (w / scale).round().clamp(-128, 127).to(torch.int8))
        self.register_buffer("scale", scale.half())
        self.register_buffer("bias", linear.bias)

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attn, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x, cache, at):
        b, t, c = x.shape
        q, k, v = self.attn(self.ln1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        cache[0][:, :, at : at + t] = k
        cache[1][:, :, at : at + t] = v
        y = F.scaled_dot_product_attention(
            q, cache[0][:, :, : at + t], cache[1][:, :, : at + t], is_causal=at == 0
        )
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


with torch.device("cuda"):
    embed = nn.Embedding(VOCAB, DIM).half()
    layers = nn.ModuleList()
    for _ in range(LAYERS):
        layers.append(Layer().half())
for layer in layers:
    for name in ("attn", "out", "up", "down"):
        setattr(layer, name, Int8Linear(getattr(layer, name)))
torch.cuda.empty_cache()


@torch.inference_mode()
def generate(rows, prompt, new):
    cache = [
        torch.zeros(2, rows, HEADS, prompt + new, DIM // HEADS, dtype=torch.half, device="cuda")
        for _ in layers
    ]
    x = embed(torch.zeros(rows, prompt, dtype=torch.long).cuda())
    at, words = 0, []
    for _ in range(new):
        step = x.shape[1]
        for layer, c in zip(layers, cache):
            x = layer(x, c, at)
        at += step
        logits = (x[:, -1] @ embed.weight.T).float()
        top, index = logits.topk(50)
        word = index.gather(1, torch.multinomial(top.softmax(-1) + 1e-9, 1))
        words.append(word)
        x = embed(word)
    return torch.cat(words, 1).tolist()


for step in recorder.steps(10):
    generate(rng.choice((1, 2, 4, 8, 8)), rng.randrange(16, 400), rng.randrange(8, 32))
    recorder.step()
