"""A training in bfloat16 fits; each 40 steps its weights are copied in 32 bits to be saved.

cause: too_large
device: 880 MiB
ends: oom
never: states of the optimiser are the most|FSDP
"""

import torch
from torch import nn

with torch.device("cuda"):
    model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(24)]).bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def save(step):
    full = {name: weight.float() for name, weight in model.state_dict().items()}
    torch.save(full, f"step{step}.pt")


for step in range(1, 81):
    x = torch.randn(64, 2048, device="cuda", dtype=torch.bfloat16)
    model(x).float().pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 40 == 0:
        save(step)
