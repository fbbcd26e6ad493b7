"""ResNet-50 classification in channels-last and bf16 autocast, fed by a prefetcher on a copy
stream."""

import recorder
import torch
import torch.nn.functional as F
from torch import nn


class Bottleneck(nn.Module):
    def __init__(self, inplanes, planes, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3 = nn.Conv2d(planes, planes * 4, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(planes * 4)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inplanes != planes * 4:
            self.downsample = nn.Sequential(
                nn.Conv2d(inplanes, planes * 4, 1, stride, bias=False), nn.BatchNorm2d(planes * 4)
            )

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        return self.relu(self.bn3(self.conv3(out)) + identity)


def resnet50(classes=1000):
    layers = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    inplanes = 64
    for planes, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for i in range(blocks):
            layers.append(Bottleneck(inplanes, planes, stride if i == 0 else 1))
            inplanes = planes * 4
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, classes))


class Prefetcher:
    def __init__(self, loader):
        self.loader = iter(loader)
        self.stream = torch.cuda.Stream()
        self.mean = torch.tensor([0.485, 0.456, 0.406]).cuda().view(1, 3, 1, 1) * 255
        self.std = torch.tensor([0.229, 0.224, 0.225]).cuda().view(1, 3, 1, 1) * 255
        self.preload()

    def preload(self):
        try:
            images, target = next(self.loader)
        except StopIteration:
            self.images = self.target = None
            return
        with torch.cuda.stream(self.stream):
            images = images.cuda(non_blocking=True)
            self.target = target.cuda(non_blocking=True)
            self.images = (
                images.float()
                .sub_(self.mean)
                .div_(self.std)
                .contiguous(memory_format=torch.channels_last)
            )

    def next(self):
        torch.cuda.current_stream().wait_stream(self.stream)
        images, target = self.images, self.target
        if images is not None:
            images.record_stream(torch.cuda.current_stream())
            target.record_stream(torch.cuda.current_stream())
        self.preload()
        return images, target


def loader(batch, size):
    while True:
        yield (
            torch.zeros(batch, 3, size, size, dtype=torch.uint8).pin_memory(),
            torch.zeros(batch, dtype=torch.long).pin_memory(),
        )


model = resnet50().cuda().to(memory_format=torch.channels_last)
optimizer = torch.optim.SGD(
    model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, nesterov=True
)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
train = Prefetcher(loader(64, 192))

for step in recorder.steps(14):
    images, target = train.next()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(images), target, label_smoothing=0.1)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    scheduler.step()
    if step % 7 == 6:
        model.eval()
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
            for batch in (100, 100, 37):
                x = torch.zeros(batch, 3, 224, 224).cuda().to(memory_format=torch.channels_last)
                out = model(x)
                top5 = out.topk(5).indices
        model.train()
    recorder.step()
