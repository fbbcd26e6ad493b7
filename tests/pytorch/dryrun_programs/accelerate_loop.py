"""accelerate: prepare, accumulation and mixed precision, around a loop of three steps."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="bf16")
layers = [nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True) for _ in range(4)]
model = nn.Sequential(nn.Embedding(1000, 256), *layers, nn.Linear(256, 1000))
optimizer = torch.optim.AdamW(model.parameters())
data = TensorDataset(torch.randint(0, 1000, (48, 256)))
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8))
for (tokens,) in loader:
    with accelerator.accumulate(model):
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
print(accelerator.gather(loss.detach()).shape)
