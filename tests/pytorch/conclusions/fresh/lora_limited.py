"""A frozen language model is tuned by low-rank adapters under a limit left from a shared card.

cause: ceiling
device: 24 GiB
ends: oom
never: no_grad|inference_mode|detach|leak
"""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.cuda.set_per_process_memory_fraction(0.25)  # the cause


class LoRA(nn.Module):
    def __init__(self, base, rank=16, alpha=32):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.empty(rank, base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))
        self.scale = alpha / rank

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.a), self.b) * self.scale


class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.o = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.fc1, self.fc2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        q, k, v = self.qkv(self.n1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.n2(x))))


def adapted(dim=2048, heads=16, layers=16):
    stack = nn.Sequential(*(Layer(dim, heads) for _ in range(layers)))
    stack.requires_grad_(False)
    for layer in stack:
        layer.qkv, layer.o = LoRA(layer.qkv), LoRA(layer.o)
    return nn.ModuleDict({"emb": nn.Embedding(32000, dim), "stack": stack})


torch.set_default_dtype(torch.bfloat16)
with torch.device("cuda"):
    model = adapted()
model.emb.requires_grad_(False)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4)
for step, length in enumerate([256, 256, 384, 384, 512, 512, 768, 768, 1024, 1024]):
    ids = torch.zeros(6, length, dtype=torch.long, device="cuda")
    hidden = model.stack(model.emb(ids))
    loss = F.cross_entropy((hidden @ model.emb.weight.T).flatten(0, 1), ids.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, length, loss.item(), flush=True)
