"""A mixture of experts trains: each expert takes its share of a batch with too many tokens.

cause: too_large
device: 16 GiB
ends: oom
never: no_grad|inference_mode|detach|leak
"""
import torch
from torch import nn
from torch.nn import functional as F


class Expert(nn.Module):
    def __init__(self, d, inner):
        super().__init__()
        self.w1, self.w3 = nn.Linear(d, inner), nn.Linear(d, inner)
        self.w2 = nn.Linear(inner, d)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Attention(nn.Module):
    def __init__(self, d, heads=8):
        super().__init__()
        self.heads, self.scale = heads, (d // heads) ** -0.5
        self.qkv = nn.Linear(d, 3 * d)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.dropout(torch.softmax(q @ k.mT * self.scale, -1), 0.1, self.training) @ v
        return x + y.transpose(1, 2).flatten(2)


class MoE(nn.Module):
    """Each expert chooses the tokens that it wants most."""

    def __init__(self, d, inner, experts=8, capacity=2.0):
        super().__init__()
        self.router = nn.Linear(d, experts, bias=False)
        self.experts = nn.ModuleList(Expert(d, inner) for _ in range(experts))
        self.capacity = capacity

    def forward(self, x):
        flat = x.flatten(0, 1)
        take = int(self.capacity * flat.size(0) / len(self.experts))
        weights, chosen = self.router(flat).softmax(-1).topk(take, dim=0)
        result = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            out = expert(flat[chosen[:, i]]) * weights[:, i, None]
            result = result.index_add(0, chosen[:, i], out)
        return x + result.view_as(x)


torch.set_default_device("cuda")
d, vocab = 1024, 32000
layers = [layer for _ in range(6) for layer in (Attention(d), MoE(d, 2816))]
model = nn.Sequential(nn.Embedding(vocab, d), *layers, nn.LayerNorm(d), nn.Linear(d, vocab))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for n in range(50):
    ids = torch.randint(vocab, (24, 1025))
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    opt.step()
    opt.zero_grad()
    print(n, loss.item(), flush=True)
