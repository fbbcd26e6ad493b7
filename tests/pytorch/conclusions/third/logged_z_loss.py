"""Fine-tunes a small GPT-like language model on random text; logs the loss every 50 steps.

cause: graph
also: grows
device: 2 GiB
ends: oom
never: hook|handle\.remove|smaller batch
"""

import argparse, math, os, time
import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.ln1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.ln2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.heads = heads

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.ln1(x)).split(c, dim=2)
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, vocab=8192, dim=256, layers=4, heads=8, length=256):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Parameter(torch.zeros(1, length, dim))
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.ln = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, idx):
        x = self.tok(idx) + self.pos[:, : idx.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))  # the cause


def z_loss(logits):
    """The auxiliary loss of PaLM: keeps the normaliser near one."""
    return 1e-4 * torch.logsumexp(logits, dim=-1).square().mean()  # the cause


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--log-every", type=int, default=50)
    args = parser.parse_args()
    device = torch.device("cuda")
    model = GPT().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    history = {"loss": [], "z": []}
    for step in range(args.steps):
        batch = torch.randint(0, 8192, (args.batch, 257), device=device)
        x, y = batch[:, :-1], batch[:, 1:]
        logits = model(x)  # the cause
        loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1))
        z = z_loss(logits)  # the cause
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        history["loss"].append(loss.item())
        history["z"].append(z)  # the cause
        if (step + 1) % args.log_every == 0:
            print(step + 1, sum(history["loss"][-50:]) / 50, float(sum(history["z"][-50:])) / 50)
        time.sleep(float(os.environ.get("SLOW", "0")))


if __name__ == "__main__":
    main()
