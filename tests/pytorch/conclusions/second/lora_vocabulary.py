"""Fine-tuning low-rank adapters with checkpointing; the 32-bit logits of a long batch do not fit.

cause: one_tensor
also: too_large
device: 16 GiB
ends: oom
never: no_grad|inference_mode|detach
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCAB, WIDTH, LAYERS, RANK = 151936, 1024, 8, 16


class LoRALinear(nn.Linear):
    def __init__(self, i, o):
        super().__init__(i, o, bias=False)
        self.weight.requires_grad_(False)
        self.A = nn.Parameter(torch.randn(RANK, i) * 0.01)
        self.B = nn.Parameter(torch.zeros(o, RANK))

    def forward(self, x):
        return F.linear(x, self.weight) + F.linear(F.linear(x, self.A), self.B) * 2.0


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (LoRALinear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = LoRALinear(WIDTH, 4 * WIDTH), LoRALinear(4 * WIDTH, WIDTH)

    def forward(self, x):
        h = F.rms_norm(x, (WIDTH,))
        q, k, v = (f(h).unflatten(-1, (8, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(F.rms_norm(x, (WIDTH,)))))


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH).requires_grad_(False)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, ids, labels):
        x = self.embed(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        logits = F.linear(x, self.embed.weight).float()
        return F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1))


with torch.device("cuda"):
    model = Base().bfloat16()
trainable = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trainable, lr=2e-4)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
for step, length in enumerate([256, 310, 128, 402, 275, 190, 366, 2048, 300]):
    ids = torch.randint(0, VOCAB, (8, length), device="cuda")
    loss = model(ids, ids)
    loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    print({"step": step, "length": length, "loss": loss.item()}, flush=True)
