"""The model does not fit.

cause: too_large
device: 6 GiB
ends: oom
never: no_grad|inference_mode|retain_graph|\.item\(\)
"""

import torch
from torch import nn


def layers(width, count):
    return nn.Sequential(*[m for _ in range(count) for m in (nn.Linear(width, width), nn.GELU())])


with torch.device("meta"):
    model = layers(8192, 40)
model.to_empty(device="cuda")
print("fits")
