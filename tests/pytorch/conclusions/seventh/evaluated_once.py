"""An evaluation within the training loop, without no_grad, while the step's scores are still there.

cause: no_grad
device: 1500MiB
ends: oom
"""

import torch
import torch.nn.functional as F
from torch import nn

D, V = 512, 8000


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.attention = nn.MultiheadAttention(D, 8, batch_first=True)
        up, down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)
        self.mlp = nn.Sequential(nn.LayerNorm(D), up, nn.GELU(), down)

    def forward(self, x):
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(V, D)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(D, V)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch():
    return torch.randint(V, (4, 256), device="cuda")


def evaluate(model):
    outs = []
    for _ in range(60):
        outs.append(model(batch()))  # the cause
    return torch.stack([out.mean() for out in outs])


def main():
    model = Model().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(30):
        tokens = batch()
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 5:
            evaluate(model)


main()
