"""Pretrained weights are loaded onto the GPU and kept beside the model.

cause: too_large
device: 2300MiB
ends: oom
never: 8 bits|FSDP
"""

import os
import tempfile

import torch
import torch.nn as nn


def net():
    return nn.Sequential(*[nn.Sequential(nn.Linear(4096, 4096), nn.GELU()) for _ in range(8)])


p = os.path.join(tempfile.mkdtemp(), "w.pt")
with torch.device("cuda"):
    torch.save({"state_dict": net().state_dict(), "args": {}}, p)
ck = torch.load(p, map_location="cuda")
model = net()
model.load_state_dict(ck["state_dict"])
model.cuda()
opt = torch.optim.Adam(model.parameters(), 1e-4)
for s in range(6):
    l = model(torch.randn(512, 4096, device="cuda")).pow(2).mean()
    opt.zero_grad()
    l.backward()
    opt.step()
