"""Super-resolution training sums a perceptual score up for its log and keeps the graph of each.

cause: graph
also: no_grad
device: 8 GiB
ends: oom
never: smaller (batch|model)|checkpoint|retain_graph
"""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Upscaler(nn.Module):
    def __init__(self, width=48, blocks=6, factor=2):
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.body = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1), nn.PReLU(),
                nn.Conv2d(width, width, 3, padding=1),
            )
            for _ in range(blocks)
        )
        self.last = nn.Sequential(
            nn.Conv2d(width, 3 * factor**2, 3, padding=1), nn.PixelShuffle(factor)
        )

    def forward(self, x):
        x = self.first(x)
        for block in self.body:
            x = x + block(x)
        return self.last(x)


def vgg_like():
    layers, last = [], 3
    for width in (32, 64, 128):
        layers += [nn.Conv2d(last, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        last = width
    return nn.Sequential(*layers)


device = "cuda"
model, judge = Upscaler().to(device), vgg_like().to(device).eval()
for p in judge.parameters():
    p.requires_grad = False
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)


def perceptual(a, b):
    return F.mse_loss(judge(a), judge(b))  # the cause


for epoch in range(4):
    running_l1, running_perceptual = 0.0, 0.0
    for i in range(100):
        low = torch.zeros(16, 3, 96, 96).to(device)
        high = torch.zeros(16, 3, 192, 192).to(device)
        out = model(low)
        loss = F.l1_loss(out, high)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running_l1 += loss.item()
        running_perceptual += perceptual(out, high)  # the cause
        if i % 2 == 0:
            print(f"[{epoch}, {i}] l1 {running_l1 / (i + 1):.4f}", flush=True)
