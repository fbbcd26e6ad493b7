"""The same with each operation on its own line.

cause: too_large
device: 7 GiB
ends: oom
never: no_grad|inference_mode|retain_graph|\.item\(\)
"""

import torch
from torch import nn

D, H, V, B, T = 1024, 16, 16000, 16, 512


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, H, D // H).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2)
        scores = scores / 8
        scores = scores.masked_fill(torch.zeros_like(scores, dtype=torch.bool), -1e9)
        weights = scores.softmax(-1)
        weights = nn.functional.dropout(weights, 0.1)
        a = weights @ v
        x = x + self.out(a.transpose(1, 2).reshape(b, t, D))
        return x + self.down(nn.functional.gelu(self.up(x)))


class GPT(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.emb, self.head = nn.Embedding(V, D), nn.Linear(D, V, bias=False)
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, i):
        x = self.emb(i)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


model = GPT(8).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(30):
    tokens = torch.zeros(B, T, dtype=torch.long, device="cuda")
    loss = nn.functional.cross_entropy(model(tokens).view(-1, V), tokens.view(-1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
