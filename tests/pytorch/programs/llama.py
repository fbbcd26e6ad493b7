"""A training of LLaMA-7B's shape, full size, bf16, AdamW: a few steps of growing length."""

import torch
from torch import nn
from torch.nn import functional as F

import gpu

WIDTH, HEADS, LAYERS, VOCABULARY, INNER = 4096, 32, 32, 32000, 11008


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x):
        batch, length, _ = x.shape
        h = self.norm1(x)
        q, k, v = (
            part(h).view(batch, length, HEADS, WIDTH // HEADS).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


gpu.install()
torch.set_default_dtype(torch.bfloat16)
with torch.device("cuda"):
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH),
        *(Block() for _ in range(LAYERS)),
        nn.RMSNorm(WIDTH),
        nn.Linear(WIDTH, VOCABULARY, bias=False),
    )
parameters = sum(parameter.numel() for parameter in model.parameters())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
for length in (512, 1024, 768, 1280):
    tokens = torch.zeros(1, length, dtype=torch.long, device="cuda")
    loss = F.cross_entropy(model(tokens).view(-1, VOCABULARY).float(), tokens.view(-1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    del loss, tokens
    gpu.check_books()
live_peak = gpu.stats().live_peak if gpu.library else torch.cuda.max_memory_allocated()
peak = gpu.phantom.phantom_physical_peak(0)
del model, optimizer
gpu.check_nothing_is_left()
gpu.report(parameters=parameters, live_peak=live_peak, peak=peak)
