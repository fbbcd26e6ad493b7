"""A language model in training that keeps a part of each step's logits: the program of the pictures
of the map (map-dark, map-light, map-zoom, map-terminal).

    python -m gruyere._stand_in python -m gruyere docs/pictures/train.py &
    gruyere map --by module; gruyere map --html map.html

It waits in the forward of step 150 to be drawn. In the browser, 1280 by 800:
`#theme=dark&by=module`; `#theme=light&view=physical&by=site`; and `#theme=light&by=module&at=0x...`
of a small block before free slots, zoomed out three times.
"""

import time

import torch
import torch.nn as nn
import torch.nn.functional as F

STEPS, SHOWN = 150, 12
WIDTH, HEADS, INNER, LAYERS, WORDS, LENGTH = 4096, 32, 11008, 16, 32000, 1024


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        return self.out((scores @ v).transpose(1, 2).reshape(batch, length, WIDTH))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, INNER, bias=False)
        self.up = nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(), MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.words(x)
        for number, layer in enumerate(self.layers):
            if step == STEPS and number == SHOWN:
                time.sleep(3600)
            x = layer(x)
        return self.head(x)


model = Model().to(torch.bfloat16).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
kept = []
for step in range(STEPS + 1):
    length = LENGTH - 128 * (step % 4)
    batch = torch.randint(WORDS, (2, length), device="cuda")
    logits = model(batch)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), batch.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    kept.append(logits[0, -128:].detach().clone())
