"""Gradual unfreezing makes a new AdamW for each stage, and the old ones live on in a list.

cause: optimizer_twice
device: 7 GiB
ends: oom
never: no_grad|inference_mode|smaller batch|checkpointing
"""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Encoder(nn.Module):
    def __init__(self, vocab=32000, dim=1280, layers=12):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 20, 4 * dim, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(dim, 3)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def unfreeze(model, count):
    for layer in model.layers[len(model.layers) - count :]:
        layer.requires_grad_(True)


model = Encoder().cuda()
model.embedding.requires_grad_(False)
model.layers.requires_grad_(False)
optimizers, schedulers = [], []

for stage, (count, rate) in enumerate([(3, 1e-3), (6, 5e-4), (9, 2e-4), (12, 1e-4), (12, 5e-5)]):
    unfreeze(model, count)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizers.append(torch.optim.AdamW(trainable, lr=rate))  # the cause
    schedulers.append(torch.optim.lr_scheduler.ExponentialLR(optimizers[-1], 0.95))
    for step in range(4):
        ids = torch.randint(0, 32000, (4, 64), device="cuda")
        labels = torch.zeros(4, dtype=torch.long, device="cuda")
        loss = F.cross_entropy(model(ids), labels)
        loss.backward()
        optimizers[-1].step()  # the cause
        optimizers[-1].zero_grad()
        schedulers[-1].step()
        print(f"stage {stage} ({count} layers) step {step}: {loss.item():.3f}", flush=True)
