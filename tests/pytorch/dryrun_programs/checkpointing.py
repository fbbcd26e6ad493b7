"""torch's activation checkpointing, selective in every second layer."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

layers = [nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True) for _ in range(8)]
model = nn.Sequential(*layers).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    x = torch.randn(8, 256, 512, device="cuda", requires_grad=True)
    if step < 2:
        out = checkpoint_sequential(model, 4, x, use_reentrant=False)
    else:
        out = x
        for number, layer in enumerate(model):
            out = checkpoint(layer, out, use_reentrant=False) if number % 2 else layer(out)
    out.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
