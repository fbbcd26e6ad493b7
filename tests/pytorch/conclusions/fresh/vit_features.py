"""A vision transformer is tuned while forward hooks collect the outputs of its blocks for a study.

cause: hooks
also: grows
device: 7 GiB
ends: oom
never: no_grad|inference_mode|smaller (batch|model)
"""
from collections import defaultdict

import torch
from torch import nn


class ViT(nn.Module):
    def __init__(self, patch=16, dim=768, depth=12, heads=12, classes=1000):
        super().__init__()
        self.patch = nn.Conv2d(3, dim, patch, patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos = nn.Parameter(torch.zeros(1, 197, dim))
        layer = nn.TransformerEncoderLayer(dim, heads, 4 * dim, 0.0, "gelu", batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, depth)
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1) + self.pos
        return self.head(self.blocks(x)[:, 0])


class Probe:
    def __init__(self, model, every=3):
        self.features = defaultdict(list)
        for i, block in enumerate(model.blocks.layers):
            if i % every == 0:
                block.register_forward_hook(self.hook(f"block{i}"))

    def hook(self, name):
        def keep(module, args, output):
            self.features[name].append(output.detach())  # the cause

        return keep


def main():
    vit = ViT().cuda()
    probe = Probe(vit)
    optimizer = torch.optim.AdamW(vit.parameters(), lr=5e-5)
    loss_function = nn.CrossEntropyLoss(label_smoothing=0.1)
    for step in range(500):
        pixels = torch.zeros(32, 3, 224, 224, device="cuda")
        labels = torch.zeros(32, dtype=torch.long, device="cuda")
        loss = loss_function(vit(pixels), labels)  # the cause
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(step, round(loss.item(), 4), len(probe.features), flush=True)


main()
