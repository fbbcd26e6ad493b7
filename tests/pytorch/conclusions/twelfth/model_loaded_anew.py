"""A server loads a new model, as the one before was loaded, which still serves.

cause: too_large
device: 500 MiB
ends: oom
never: optimiser|FSDP|queue|shard
"""

import torch
from torch import nn


def load():
    return nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(36)]).half().cuda().eval()


served = load()
with torch.inference_mode():
    for request in range(400):
        served(torch.zeros(8 + request % 24, 2048, dtype=torch.half, device="cuda"))
served = load()
