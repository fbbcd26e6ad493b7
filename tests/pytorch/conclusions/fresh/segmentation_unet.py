"""A U-Net segments large aerial photographs and keeps its skip connections until the way up.

cause: too_large
device: 12 GiB
ends: oom
never: no_grad|inference_mode|detach|leak|\.cpu\(\)
"""
import torch
import torch.nn as nn


def double(cin, cout):
    return nn.Sequential(
        nn.Conv2d(cin, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout), nn.ReLU(True),
        nn.Conv2d(cout, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout), nn.ReLU(True),
    )


class UNet(nn.Module):
    def __init__(self, channels=(64, 128, 256, 512), classes=6):
        super().__init__()
        self.downs = nn.ModuleList()
        self.ups = nn.ModuleList()
        previous = 3
        for c in channels:
            self.downs.append(double(previous, c))
            previous = c
        self.bottom = double(channels[-1], 2 * channels[-1])
        for c in reversed(channels):
            self.ups.append(nn.ConvTranspose2d(2 * c, c, 2, stride=2))
            self.ups.append(double(2 * c, c))
        self.pool = nn.MaxPool2d(2)
        self.last = nn.Conv2d(channels[0], classes, 1)

    def forward(self, x):
        skips = []
        for down in self.downs:
            x = down(x)
            skips.append(x)
            x = self.pool(x)
        x = self.bottom(x)
        for i in range(0, len(self.ups), 2):
            x = self.ups[i](x)
            x = torch.cat([skips.pop(), x], dim=1)
            x = self.ups[i + 1](x)
        return self.last(x)


device = torch.device("cuda")
net = UNet().to(device)
sgd = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.99, nesterov=True)
loss_fn = nn.CrossEntropyLoss()
for epoch in range(3):
    for i in range(20):
        photo = torch.zeros(6, 3, 768, 768).to(device)
        mask = torch.zeros(6, 768, 768, dtype=torch.long).to(device)
        sgd.zero_grad(set_to_none=True)
        loss = loss_fn(net(photo), mask)
        loss.backward()
        sgd.step()
        print(f"epoch {epoch} [{i}/20] loss {loss.item()}", flush=True)
