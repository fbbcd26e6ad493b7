"""Hooks keep the outputs of all steps, with their graphs.

cause: hooks
also: graph
device: 3GiB
ends: oom
"""

from collections import defaultdict

import torch
import torch.nn as nn

acts = defaultdict(list)


def make_hook(name):
    def hook(mod, inp, out):
        acts[name].append(out)  # the cause

    return hook


model = nn.Sequential(*[nn.Sequential(nn.Linear(2048, 2048), nn.ReLU()) for _ in range(6)]).cuda()
for n, m in model.named_modules():
    if isinstance(m, nn.ReLU):
        m.register_forward_hook(make_hook(n))
opt = torch.optim.Adam(model.parameters())
for step in range(1000):
    x = torch.randn(2048, 2048, device="cuda")
    loss = model(x).mean()  # the cause
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(step, float(loss))
