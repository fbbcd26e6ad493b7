"""Trains a ResNet-like classifier, with a forward hook that watches the statistics of features.

cause: hooks
device: 1 GiB
ends: oom
never: no_grad|smaller batch
"""

import os, time
import torch
import torch.nn as nn
import torch.nn.functional as F


class Residual(nn.Module):
    def __init__(self, cin, cout, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(cout)
        self.conv2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(cout)
        same = cin == cout and stride == 1
        self.skip = nn.Identity() if same else nn.Conv2d(cin, cout, 1, stride)

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + self.skip(x))


class Net(nn.Module):
    def __init__(self, classes=100):
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 3, 1, 1)
        self.layer1 = nn.Sequential(Residual(64, 64), Residual(64, 64))
        self.layer2 = nn.Sequential(Residual(64, 128, 2), Residual(128, 128))
        self.layer3 = nn.Sequential(Residual(128, 256, 2), Residual(256, 256))
        self.fc = nn.Linear(256, classes)

    def forward(self, x):
        x = self.stem(x)
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(x.mean((2, 3)))


class FeatureWatcher:
    """Collects the outputs of some layers, to plot them afterwards."""

    def __init__(self, model, names):
        self.features = {name: [] for name in names}
        for name, module in model.named_modules():
            if name in self.features:
                module.register_forward_hook(self.hook(name))

    def hook(self, name):
        def record(module, inputs, output):
            self.features[name].append(output.detach())  # the cause

        return record


def train(model, watcher, steps=500, batch=64):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda")
    for step in range(steps):
        images = torch.randn(batch, 3, 32, 32).cuda(non_blocking=True)
        labels = torch.randint(0, 100, (batch,)).cuda(non_blocking=True)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(images), labels)  # the cause
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.3f}", flush=True)
        time.sleep(float(os.environ.get("SLOW", "0")))


if __name__ == "__main__":
    net = Net().cuda()
    train(net, FeatureWatcher(net, ["layer1", "layer2", "layer3"]))
