"""Transformer encoder on texts of varying length, padded to the longest of the batch.

cause: one_tensor
device: 2 GiB
ends: oom
never: no_grad|\.item\(\)
"""
import random
import torch
from torch import nn
import torch.nn.functional as F


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)) / (d // self.heads) ** 0.5  # the cause
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, d))


class Block(nn.Module):
    def __init__(self, dim=256, heads=8):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        x = x + self.attn(self.n1(x))
        return x + self.mlp(self.n2(x))


def collate(texts):
    longest = max(texts)
    return torch.zeros(len(texts), longest, dtype=torch.long)


rng = random.Random(1)
corpus = [[rng.randrange(60, 200) for _ in range(8)] for _ in range(200)]
corpus[37][5] = 2900                                 # someone pasted a whole log file
embed = nn.Embedding(10_000, 256).cuda()
blocks = nn.Sequential(*[Block() for _ in range(4)]).cuda()
head = nn.Linear(256, 2).cuda()
params = [*embed.parameters(), *blocks.parameters(), *head.parameters()]
opt = torch.optim.AdamW(params, 3e-4)
for texts in corpus:
    tokens = collate(texts).cuda()
    logits = head(blocks(embed(tokens)).mean(1))
    loss = F.cross_entropy(logits, torch.zeros(len(texts), dtype=torch.long, device="cuda"))
    opt.zero_grad()
    loss.backward()
    opt.step()
