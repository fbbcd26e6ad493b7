"""Merges fine-tuned checkpoints of one base: task vectors, trimming by magnitude, sign election,
then evaluation."""

import random

import recorder
import torch
import torch.nn.functional as F
from torch import nn

rng = random.Random(909)


class Layer(nn.Module):
    def __init__(self, d=1024):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        q, k, v = (
            z.unflatten(2, (16, 64)).transpose(1, 2) for z in self.qkv(self.n1(x)).chunk(3, -1)
        )
        x = x + self.o(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.down(F.gelu(self.up(self.n2(x))))


def build():
    with torch.device("cuda"):
        return nn.Sequential(
            nn.Embedding(32000, 1024), *[Layer() for _ in range(12)], nn.Linear(1024, 32000)
        ).bfloat16()


model = build()
base = {k: v.clone() for k, v in model.state_dict().items()}
# Experts as files of the disk: loaded to the host.
hosts = {k: torch.zeros(v.shape, dtype=v.dtype) for k, v in base.items()}
deltas = []
for _ in range(4):
    expert = {k: v.cuda() for k, v in hosts.items()}
    deltas.append({k: expert[k] - base[k] for k in base})
    del expert


def trim(delta, keep):
    flat = delta.float().abs().flatten()
    cut = (
        flat.kthvalue(max(1, int(len(flat) * (1 - keep)))).values
        if len(flat) < 2_000_000
        else flat.sort().values[int(len(flat) * (1 - keep))]
    )
    return torch.where(delta.abs() >= cut, delta, torch.zeros_like(delta))


def ties(chosen, keep, weight):
    merged = {}
    for name in base:
        stack = torch.stack([trim(d[name], keep) for d in chosen]).float()
        sign = stack.sum(0).sign()
        agree = stack * (stack.sign() == sign)
        merged[name] = (
            base[name] + weight * agree.sum(0) / (agree != 0).sum(0).clamp(min=1)
        ).bfloat16()
    return merged


def dare(chosen, drop):
    return {k: base[k] + sum(F.dropout(d[k], drop) for d in chosen) / len(chosen) for k in base}


scores = {}
for step in recorder.steps(8):
    chosen = rng.sample(deltas, rng.randrange(2, 5))
    method = rng.choice(("ties", "dare", "average"))
    if method == "ties":
        merged = ties(chosen, rng.choice((0.1, 0.2, 0.5)), 1.0)
    elif method == "dare":
        merged = dare(chosen, 0.9)
    else:
        merged = {k: base[k] + torch.stack([d[k] for d in chosen]).mean(0) for k in base}
    model.load_state_dict(merged)
    losses = []
    with torch.inference_mode():
        for _ in range(4):
            tokens = torch.zeros(4, rng.choice((256, 384, 512)), dtype=torch.long).cuda()
            logits = model(tokens)
            losses.append(
                F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
            )
    scores[step] = torch.stack(losses).mean().item()
    recorder.step()
