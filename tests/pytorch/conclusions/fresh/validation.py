"""An image classifier validates after each epoch in eval mode, but records graphs meanwhile.

cause: no_grad
also: graph
device: 2 GiB
ends: oom
never: smaller (batch|model)|checkpoint|optimizer
"""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class Flowers(Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return torch.zeros(3, 96, 96, dtype=torch.uint8), i % 102


class Residual(nn.Module):
    def __init__(self, a, b, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(a, b, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(b)
        self.conv2 = nn.Conv2d(b, b, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(b)
        self.short = nn.Conv2d(a, b, 1, stride, bias=False)

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.short(x))


def resnet(classes):
    widths = [64, 64, 128, 256, 512]
    blocks = [Residual(a, b, 2 if a != b else 1) for a, b in zip(widths, widths[1:])]
    stem = [nn.Conv2d(3, 64, 7, 2, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes)]
    return nn.Sequential(*stem, *blocks, *head)


def validate(model, loader):
    model.eval()
    predictions, truth = [], []
    for images, labels in loader:
        predictions.append(model(images.cuda() / 255))  # the cause
        truth.append(labels)
        print("  validated", len(predictions), flush=True)
    return (torch.cat(predictions).argmax(1).cpu() == torch.cat(truth)).float().mean()


model = resnet(102).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
train, test = DataLoader(Flowers(256), 64), DataLoader(Flowers(2560), 64)
for epoch in range(5):
    model.train()
    for images, labels in train:
        loss = F.cross_entropy(model(images.cuda() / 255), labels.cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("epoch", epoch, "accuracy", validate(model, test).item(), flush=True)
