"""A card of 8 GB near its end: GPT-2 medium, trained in full with AdamW in bf16 autocast, the batch
as large as it goes."""

import recorder
import torch
from transformers import GPT2Config, GPT2LMHeadModel

with torch.device("cuda"):
    model = GPT2LMHeadModel(GPT2Config(n_embd=1024, n_layer=24, n_head=16, use_cache=False))
model.gradient_checkpointing_enable()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in recorder.steps(4):
    tokens = recorder.blank(4, recorder.draw.randrange(750, 1060))
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    recorder.step()
