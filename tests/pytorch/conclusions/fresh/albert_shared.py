"""A language model in ALBERT's manner calls its only layer 12 times in each forward pass.

cause: too_large
device: 10 GiB
ends: oom
never: no_grad|inference_mode|detach|leak
"""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Albert(nn.Module):
    def __init__(self, vocab=30000, emb=128, hidden=1024, heads=16, depth=12):
        super().__init__()
        self.depth = depth
        self.embed = nn.Embedding(vocab, emb)
        self.up = nn.Linear(emb, hidden)
        self.shared = nn.TransformerEncoderLayer(
            hidden, heads, dim_feedforward=4 * hidden, activation="gelu", batch_first=True
        )
        self.down = nn.Linear(hidden, emb)

    def forward(self, tokens):
        h = self.up(self.embed(tokens))
        for _ in range(self.depth):
            h = self.shared(h)
        return F.linear(self.down(h), self.embed.weight)


def mask_tokens(tokens, p=0.15):
    chosen = torch.rand(tokens.shape) < p
    return tokens.masked_fill(chosen, 4), tokens.masked_fill(~chosen, -100)


def train(model, steps, batch):
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
    warmup = torch.optim.lr_scheduler.LinearLR(opt, 0.1, 1.0, total_iters=10)
    scaler = torch.amp.GradScaler("cuda")
    for step in range(steps):
        inputs, labels = mask_tokens(torch.randint(5, 30000, (batch, 256)))
        inputs, labels = inputs.cuda(non_blocking=True), labels.cuda(non_blocking=True)
        with torch.autocast("cuda", dtype=torch.float16):
            logits = model(inputs)
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        warmup.step()
        print(step, loss.item(), flush=True)


# 16 went well, 64 would give the batch size of the paper sooner
for size in (16, 64):
    train(Albert().cuda(), 8, size)
