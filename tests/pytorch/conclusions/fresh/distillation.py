"""A student learns from a frozen teacher while an average of its weights follows; all is well.

cause: nothing
device: 8 GiB
ends: killed
never: no_grad|inference_mode|detach|leak|smaller batch
"""
import copy
import os
import signal

import torch
import torch.nn as nn
import torch.nn.functional as F


def mlp_mixer(depth, width, patches=196, classes=100):
    class Mix(nn.Module):
        def __init__(self):
            super().__init__()
            self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.token = nn.Sequential(nn.Linear(patches, 384), nn.GELU(), nn.Linear(384, patches))
            self.chan = nn.Sequential(
                nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
            )

        def forward(self, x):
            x = x + self.token(self.n1(x).transpose(1, 2)).transpose(1, 2)
            return x + self.chan(self.n2(x))

    class Mixer(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Conv2d(3, width, 16, 16)
            self.body = nn.Sequential(*(Mix() for _ in range(depth)))
            self.head = nn.Linear(width, classes)

        def forward(self, img):
            return self.head(self.body(self.stem(img).flatten(2).transpose(1, 2)).mean(1))

    return Mixer()


teacher = mlp_mixer(12, 1024).cuda().eval().requires_grad_(False)
student = mlp_mixer(6, 512).cuda()
ema = copy.deepcopy(student).requires_grad_(False)
opt = torch.optim.AdamW(student.parameters(), 1e-3)
T = 4.0

for step in range(30):
    images = torch.zeros(64, 3, 224, 224, device="cuda")
    labels = torch.zeros(64, dtype=torch.long, device="cuda")
    with torch.no_grad():
        soft = F.softmax(teacher(images) / T, -1)
    out = student(images)
    loss = F.cross_entropy(out, labels) + T * T * F.kl_div(
        F.log_softmax(out / T, -1), soft, reduction="batchmean"
    )
    opt.zero_grad()
    loss.backward()
    opt.step()
    with torch.no_grad():
        for e, s in zip(ema.parameters(), student.parameters()):
            e.lerp_(s, 0.001)
    print("step", step, loss.item(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
