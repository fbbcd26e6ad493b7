"""A compiled model is trained on batches that are too large for it.

cause: too_large
device: 2 GiB
ends: oom
never: forwards without gradients|\.cpu\(\)
"""

import torch
from torch import nn

layer = (512, 8, 1024, 0.0)
layers = [nn.TransformerEncoderLayer(*layer, batch_first=True) for _ in range(4)]
model = nn.Sequential(nn.Embedding(8000, 512), *layers, nn.Linear(512, 8000)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
compiled = torch.compile(model, backend="aot_eager")
for step in range(20):
    ids = torch.randint(0, 8000, (64, 256), device="cuda")
    out = compiled(ids)
    loss = nn.functional.cross_entropy(out.flatten(0, 1), ids.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
