"""Inference under no_grad of a batch whose activations do not fit.

cause: too_large
also: one_tensor
device: 4 GiB
ends: oom
never: no_grad|inference_mode
"""

import torch
from torch import nn


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(2048, 8192), nn.Linear(8192, 2048)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


model = nn.Sequential(*[Wide() for _ in range(8)]).cuda().eval()
with torch.no_grad():
    for size in (1024, 4096, 16384, 65536):
        model(torch.randn(size, 2048, device="cuda"))
