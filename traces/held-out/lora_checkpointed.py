"""LoRA fine-tuning of a frozen 1B-like decoder in bf16, each layer checkpointed, prompts of any
length."""

import random

import recorder
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

rng = random.Random(42)
VOCAB, DIM, HEADS, KV, LAYERS, HIDDEN = 32000, 2048, 32, 4, 16, 5632


class Lora(nn.Module):
    def __init__(self, a, b, rank=16):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(b, a, dtype=torch.bfloat16), requires_grad=False)
        self.down = nn.Parameter(torch.randn(rank, a) * 0.01)
        self.up = nn.Parameter(torch.zeros(b, rank))

    def forward(self, x):
        low = F.dropout(x, 0.05, self.training) @ self.down.T.to(x.dtype) @ self.up.T.to(x.dtype)
        return F.linear(x, self.weight) + 2.0 * low


class Rms(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM, dtype=torch.bfloat16), requires_grad=False)

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * y.to(x.dtype)


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        head = DIM // HEADS
        self.n1, self.n2 = Rms(), Rms()
        self.q, self.k, self.v, self.o = (
            Lora(DIM, DIM),
            Lora(DIM, KV * head),
            Lora(DIM, KV * head),
            Lora(DIM, DIM),
        )
        self.gate, self.up, self.down = Lora(DIM, HIDDEN), Lora(DIM, HIDDEN), Lora(HIDDEN, DIM)

    def forward(self, x, cos, sin):
        b, t, _ = x.shape
        y = self.n1(x)
        q = rotate(self.q(y).view(b, t, HEADS, -1).transpose(1, 2), cos, sin)
        k = rotate(self.k(y).view(b, t, KV, -1).transpose(1, 2), cos, sin)
        v = self.v(y).view(b, t, KV, -1).transpose(1, 2)
        k, v = k.repeat_interleave(HEADS // KV, 1), v.repeat_interleave(HEADS // KV, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, t, DIM))
        y = self.n2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


with torch.device("cuda"):
    embed = nn.Embedding(VOCAB, DIM, dtype=torch.bfloat16).requires_grad_(False)
    layers = nn.ModuleList(Layer() for _ in range(LAYERS))
    norm = Rms()
    head = nn.Linear(DIM, VOCAB, bias=False, dtype=torch.bfloat16).requires_grad_(False)
trained = [p for p in layers.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=2e-4)
print(sum(p.numel() for p in trained), "trained parameters")

for step in recorder.steps(8):
    for _ in range(2):
        rows, length = 4, rng.randrange(120, 900)
        tokens = torch.randint(VOCAB, (rows, length)).cuda()
        angle = torch.arange(length, device="cuda")[:, None] / 10000 ** (
            torch.arange(0, 32, device="cuda") / 32
        )
        cos = torch.cat([angle.cos()] * 2, -1).to(torch.bfloat16)
        sin = torch.cat([angle.sin()] * 2, -1).to(torch.bfloat16)
        x = embed(tokens).requires_grad_()
        for layer in layers:
            x = checkpoint(layer, x, cos, sin, use_reentrant=False)
        logits = head(norm(x)).float()
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), tokens[:, 1:].reshape(-1)) / 2
        loss.backward()
    nn.utils.clip_grad_norm_(trained, 0.3)
    optimizer.step()
    optimizer.zero_grad()
    recorder.step()
