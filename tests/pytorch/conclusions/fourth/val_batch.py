"""Segmentation: trains with batch 4, validates after 20 steps with batch 64.

cause: one_tensor
also: too_large
device: 512 MiB
ends: oom
never: \.item\(\)
"""
import torch
from torch import nn
import torch.nn.functional as F

TRAIN_BATCH = 4
VAL_BATCH = 64


class SegNet(nn.Module):
    def __init__(self, classes=21):
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.mid = nn.Conv2d(32, 64, 3, padding=1)
        self.head = nn.Conv2d(64, classes, 1)

    def forward(self, x):
        x = F.relu(self.stem(x))
        x = F.relu(self.mid(x))  # the cause
        return self.head(x)


def loader(batch, count):
    for _ in range(count):
        yield torch.zeros(batch, 3, 128, 128), torch.zeros(batch, 128, 128, dtype=torch.long)


def train_one(model, opt, images, masks):
    model.train()
    loss = F.cross_entropy(model(images.cuda()), masks.cuda())
    opt.zero_grad()
    loss.backward()
    opt.step()


@torch.no_grad()
def validate(model):
    model.eval()
    hits = 0
    for images, masks in loader(VAL_BATCH, 4):
        prediction = model(images.cuda()).softmax(1).argmax(1)
        hits += (prediction == masks.cuda()).sum().item()
    return hits


model = SegNet().cuda()
opt = torch.optim.AdamW(model.parameters())
for epoch in range(5):
    for images, masks in loader(TRAIN_BATCH, 20):
        train_one(model, opt, images, masks)
    print("epoch", epoch, "hits", validate(model))
