"""torch.compile with the backend that compiles nothing, on a model of transformers'."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

config = GPT2Config(n_embd=256, n_layer=4, n_head=4, vocab_size=4000, use_cache=False)
model = torch.compile(GPT2LMHeadModel(config).cuda(), backend="eager")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(3):
    tokens = torch.randint(0, 4000, (4, 256)).cuda()
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
