"""Trains an encoder (BERT-like) with masked tokens. The batch is simply too large.

cause: too_large
device: 4 GiB
ends: oom
never: no_grad|handle\.remove
"""

import argparse, os, time
import torch
import torch.nn as nn
import torch.nn.functional as F


class MaskedLM(nn.Module):
    def __init__(self, vocab, dim, layers, heads, length):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.position = nn.Embedding(length, dim)
        layer = nn.TransformerEncoderLayer(dim, heads, 4 * dim, dropout=0.1, batch_first=True,
                                           norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.decoder = nn.Linear(dim, vocab)

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.embed(tokens) + self.position(positions)
        return self.decoder(self.encoder(hidden))


def masked(tokens, vocab, rate=0.15):
    mask = torch.rand(tokens.shape, device=tokens.device) < rate
    return torch.where(mask, vocab - 1, tokens), torch.where(mask, tokens, -100)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=96)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    vocab = 16384
    model = MaskedLM(vocab, args.dim, args.layers, 8, args.length).to("cuda")
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 50))
    for step in range(args.steps):
        tokens = torch.randint(0, vocab - 1, (args.batch_size, args.length), device="cuda")
        inputs, targets = masked(tokens, vocab)
        logits = model(inputs)
        loss = F.cross_entropy(logits.view(-1, vocab), targets.view(-1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step}: {loss.item():.3f}", flush=True)
        time.sleep(float(os.environ.get("SLOW", "0")))


if __name__ == "__main__":
    main()
