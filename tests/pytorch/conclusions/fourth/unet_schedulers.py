"""Diffusion U-Net; warm restarts by a new AdamW each epoch; the LR curve is plotted at the end.

cause: optimizer_twice
device: 1 GiB
ends: oom
never: smaller batch|no_grad
"""
import torch
from torch import nn
import torch.nn.functional as F


class Down(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.conv = nn.Conv2d(a, b, 3, padding=1)
        self.norm = nn.GroupNorm(8, b)

    def forward(self, x):
        return F.silu(self.norm(self.conv(x)))


class UNet(nn.Module):
    def __init__(self, w=128):
        super().__init__()
        self.inp = nn.Conv2d(3, w, 3, padding=1)
        self.down = nn.ModuleList([Down(w, 2 * w), Down(2 * w, 4 * w)])
        self.mid = Down(4 * w, 4 * w)
        self.up = nn.ModuleList([Down(8 * w, 2 * w), Down(4 * w, w)])
        self.out = nn.Conv2d(w, 3, 3, padding=1)

    def forward(self, x, t):
        x = self.inp(x)
        skips = []
        for d in self.down:
            x = d(x)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.mid(x)
        for u in self.up:
            x = F.interpolate(x, scale_factor=2)
            x = u(torch.cat([x, skips.pop()], 1))
        return self.out(x)


def run_epoch(model, opt, sched, steps=4):
    for _ in range(steps):
        clean = torch.zeros(8, 3, 16, 16, device="cuda")
        noise = torch.randn_like(clean)
        loss = F.mse_loss(model(clean + noise, None), noise)
        opt.zero_grad()
        loss.backward()
        opt.step()  # the cause
        sched.step()


model = UNet().cuda()
schedulers = []                 # for the plot of the learning rate
for epoch in range(100):
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=4)
    schedulers.append(sched)
    run_epoch(model, opt, sched)
