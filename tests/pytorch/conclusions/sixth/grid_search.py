"""The results of a search keep the models and their optimisers.

cause: grows
also: optimizer_twice
device: 3GiB
ends: oom
"""

import torch
import torch.nn as nn
from torch.func import functional_call


def run(width, lr):
    net = nn.Sequential(  # the cause
        nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    ).cuda()
    params = {  # the cause
        k: v.detach().clone().requires_grad_() for k, v in net.named_parameters()  # the cause
    }  # the cause
    opt = torch.optim.Adam(params.values(), lr)  # the cause
    for i in range(3):
        x = torch.randn(512, 784, device="cuda")
        y = torch.randint(0, 10, (512,), device="cuda")
        loss = nn.functional.cross_entropy(functional_call(net, params, (x,)), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    return {"width": width, "lr": lr, "loss": loss.item(), "params": params, "opt": opt}


results = [run(w, lr) for w in (2048, 4096, 6144) for lr in (1e-2, 1e-3, 1e-4)]  # the cause
print(min(results, key=lambda r: r["loss"])["width"])
