"""Losses with their graphs are kept, and graphs are retained.

cause: graph
device: 5GiB
ends: oom
"""

import torch
import torch.nn as nn

G = nn.Sequential(
    nn.Linear(128, 2048), nn.ReLU(), nn.Linear(2048, 8192), nn.ReLU(), nn.Linear(8192, 3 * 64 * 64)
).cuda()
D = nn.Sequential(nn.Linear(3 * 64 * 64, 4096), nn.LeakyReLU(0.2), nn.Linear(4096, 1)).cuda()
og, od = torch.optim.Adam(G.parameters(), 2e-4), torch.optim.Adam(D.parameters(), 2e-4)
bce = nn.BCEWithLogitsLoss()
log = {"d": [], "g": [], "gp": []}
for i in range(200):
    real = torch.randn(256, 3 * 64 * 64, device="cuda")
    fake = G(torch.randn(256, 128, device="cuda"))  # the cause
    dl = bce(D(real), torch.ones(256, 1, device="cuda")) + bce(  # the cause
        D(fake), torch.zeros(256, 1, device="cuda")
    )  # the cause
    od.zero_grad()
    dl.backward(retain_graph=True)
    od.step()
    f2 = D(G(torch.randn(256, 128, device="cuda")))  # the cause
    gl = bce(f2, torch.ones(256, 1, device="cuda"))  # the cause
    og.zero_grad()
    gl.backward(retain_graph=True)
    og.step()
    log["d"].append(dl)
    log["g"].append(gl)
