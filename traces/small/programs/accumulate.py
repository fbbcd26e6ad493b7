"""Gradient accumulation: a GPT-2 of 124 million parameters, five small batches of varied lengths a
step, bf16 autocast, checkpoints of every layer."""

import recorder
import torch
from transformers import GPT2Config, GPT2LMHeadModel

with torch.device("cuda"):
    model = GPT2LMHeadModel(GPT2Config(use_cache=False))
model.gradient_checkpointing_enable()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
for _ in recorder.steps(2):
    total = 0.0
    for _ in range(5):
        tokens = recorder.blank(recorder.draw.randint(1, 4), recorder.draw.randrange(100, 1000))
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(tokens, labels=tokens).loss / 5
        loss.backward()
        total += loss.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    total.item()
    recorder.step()
