"""Autograd of a small transformer: a few steps, the books checked after each."""

import torch
from torch import nn

import gpu

gpu.install()
torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True)
model = nn.Sequential(
    nn.Embedding(1000, 256), nn.TransformerEncoder(layer, 4), nn.Linear(256, 1000)
).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(6):
    tokens = torch.zeros(4, 64 + 16 * step, dtype=torch.long, device="cuda")
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    del tokens, loss
    gpu.check_books()
grads = all(parameter.grad is None for parameter in model.parameters())
del model, optimizer, layer
gpu.check_nothing_is_left()
gpu.report(grads_dropped=grads)
