"""A measure of each output is kept with its graph, beside the loss that is trained on.

cause: graph
also: grows
device: 2GiB
ends: oom
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attend = nn.MultiheadAttention(dim, 8, batch_first=True)
        self.mix = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        h = self.norm(x)
        x = x + self.attend(h, h, h, need_weights=False)[0]
        return x + self.mix(self.norm(x))


class Net(nn.Module):
    def __init__(self, dim=512, blocks=6, words=8000):
        super().__init__()
        self.embed = nn.Embedding(words, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(blocks))
        self.head = nn.Linear(dim, words)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.training else block(x)
        return self.head(x)


net = Net().cuda()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler()
kept = []
for step in range(400):
    net.train()
    for micro in range(2):
        ids = torch.randint(0, 8000, (8, 256)).cuda()
        with torch.autocast("cuda", torch.float16):
            out = net(ids)  # the cause
            loss = F.cross_entropy(out.flatten(0, 1), ids.flatten()) / 2
        scaler.scale(loss).backward()
        kept.append(out.float().pow(2).mean())  # the cause
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if step % 5 == 4:
        net.eval()
        with torch.no_grad(), torch.autocast("cuda", torch.float16):
            ids = torch.randint(0, 8000, (8, 256)).cuda()
            F.cross_entropy(net(ids).flatten(0, 1), ids.flatten())
