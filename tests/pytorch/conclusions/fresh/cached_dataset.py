"""A data set caches each decoded volume on the GPU; the job is killed before the card is full.

cause: cache
also: grows
device: 12 GiB
ends: killed
never: no_grad|inference_mode|smaller (batch|model)
"""
import os
import signal

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

DEVICE = "cuda:0"


class Scans(Dataset):
    def __init__(self, cases):
        self.cases = cases
        self.cache = {}

    def __len__(self):
        return self.cases

    def load(self, index):
        raw = torch.zeros(128, 256, 256, dtype=torch.uint8)
        return (raw.to(DEVICE).float() - 40) / 200  # the cause

    def __getitem__(self, index):
        if index not in self.cache:
            self.cache[index] = self.load(index)  # the cause
        return self.cache[index][None], index % 2


class Net3d(nn.Module):
    def __init__(self):
        super().__init__()
        self.slices = nn.Sequential(
            nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )
        self.across = nn.LSTM(32, 64, batch_first=True)
        self.head = nn.Linear(64, 2)

    def forward(self, scan):
        b, c, d, h, w = scan.shape
        features = self.slices(scan.transpose(1, 2).reshape(b * d, c, h, w)).view(b, d, -1)
        return self.head(self.across(features)[0][:, -1])


net = Net3d().to(DEVICE)
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
loss_fn = nn.CrossEntropyLoss()
loader = DataLoader(Scans(2000), batch_size=4, shuffle=True)
for i, (scan, label) in enumerate(loader):
    loss = loss_fn(net(scan), label.to(DEVICE))
    opt.zero_grad()
    loss.backward()
    opt.step()
    if i % 5 == 0:
        print(f"batch {i}/{len(loader)}: {loss.item():.3f}", flush=True)
    if i == 45:  # the queue's limit of time
        os.kill(os.getpid(), signal.SIGKILL)
