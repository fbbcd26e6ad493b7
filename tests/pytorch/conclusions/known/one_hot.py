"""A one-hot of a vocabulary where an index would do.

cause: one_tensor
device: 8 GiB
ends: oom
never: no_grad|inference_mode
"""

import torch
from torch import nn

table = nn.Linear(50000, 64, bias=False).cuda()
optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
for step in range(10):
    tokens = torch.zeros(8, 4096, dtype=torch.long, device="cuda")
    hot = nn.functional.one_hot(tokens, 50000)  # the cause
    table(hot.float()).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
