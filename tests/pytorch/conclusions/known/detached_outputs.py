"""A server keeps inputs and outputs of all requests; outputs have no graph, though gradients are
on.

cause: grows
also: too_large
device: 1GiB
ends: oom
never: no_grad|inference_mode
"""

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(1024, 4096)
        self.second = nn.Linear(4096, 1024)

    def forward(self, x):
        return self.second(F.relu(self.first(x)))  # the cause


def serve(net):
    seen = []
    for _ in range(2000):
        x = torch.randn(256, 1024, device="cuda")  # the cause
        seen.append((x, net(x).detach()))  # the cause


serve(Net().cuda().eval())
