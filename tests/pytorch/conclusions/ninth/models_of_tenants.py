"""A server moves the model of each tenant to the GPU, and none of them leaves it.

cause: grows
also: too_large
device: 1 GiB
ends: oom
never: _steps\.py|in wrapper
"""

import torch
from torch import nn


class Level(nn.Module):
    def __init__(self, depth, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.body = nn.ModuleList([nn.Linear(width, width)])
        if depth:
            self.body.append(nn.Sequential(Level(depth - 1, width)))

    def forward(self, x):
        for layer in self.body:
            x = layer(self.norm(x))
        return x


class Server:
    def __init__(self):
        self.models = {}

    def model_of(self, tenant):
        if tenant not in self.models:
            model = Level(7, 1024)
            self.models[tenant] = model.to("cuda").eval()  # the cause
        return self.models[tenant]

    @torch.inference_mode()
    def answer(self, tenant, x):
        return self.model_of(tenant)(x).argmax(-1).tolist()


server = Server()
for request in range(400):
    server.answer(f"tenant {request // 4}", torch.randn(4, 1024, device="cuda"))
