"""The pool of one CUDA graph leaves no room for an eager evaluation.

cause: cuda_graphs
device: 1200 MiB
ends: oom
"""

import torch
from torch import nn

m = nn.Sequential(*[x for _ in range(8) for x in (nn.Linear(1024, 1024), nn.ReLU())]).cuda()
x = torch.randn(16384, 1024, device="cuda")
g = torch.cuda.CUDAGraph()
s = torch.cuda.Stream()
opt = torch.optim.SGD(m.parameters(), 1e-3)
with torch.cuda.graph(g):
    loss = m(x).square().mean()
    loss.backward()
for i in range(5):
    g.replay()
    opt.step()
for i in range(20):
    y = m(torch.randn(16384, 1024, device="cuda")).square().mean()
    y.backward()
    opt.step()
