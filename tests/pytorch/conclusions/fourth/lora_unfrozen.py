"""LoRA finetuning: only the adapters are in the optimiser, but the base was never frozen.

cause: too_large
device: 800 MiB
ends: oom
never: smaller batch|\.item\(\)
"""
import torch
from torch import nn
import torch.nn.functional as F


class LoRALinear(nn.Module):
    def __init__(self, base, rank=8):
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.zeros(rank, base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def add_lora(model):
    for block in model.blocks:
        block.up = LoRALinear(block.up)
        block.down = LoRALinear(block.down)
    return [p for name, p in model.named_parameters() if name.endswith((".a", ".b"))]


class LM(nn.Module):
    def __init__(self, dim=1024, layers=12, vocab=16000):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList([Block(dim) for _ in range(layers)])
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


with torch.device("cuda"):
    model = LM()
    adapters = add_lora(model)
optimizer = torch.optim.AdamW(adapters, lr=2e-4)
for step in range(1000):
    ids = torch.zeros(2, 64, dtype=torch.long, device="cuda")
    loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
