"""A cell written by hand runs over 400 steps in time, and backward through all of them.

cause: too_large
device: 4 GiB
ends: oom
never: no_grad|inference_mode
"""

import torch
from torch import nn


class Cell(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.input, self.state = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)

    def forward(self, x, h):
        a, b, c = (self.input(x) + self.state(h)).chunk(3, -1)
        return torch.sigmoid(a) * h + torch.tanh(b) * torch.sigmoid(c)


cell = Cell(1024).cuda()
optimizer = torch.optim.SGD(cell.parameters(), lr=0.1)
for step in range(20):
    h = torch.zeros(256, 1024, device="cuda")
    for time in range(200 + 40 * step):
        h = cell(torch.randn(256, 1024, device="cuda"), h)
    h.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
