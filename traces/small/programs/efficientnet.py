"""Vision, training: an EfficientNet-B0, channels last, RMSprop with momentum, mixed precision with
a scaler, sizes of pictures that grow as progressive resizing has it."""

import recorder
import torch
from torch import nn
from torch.nn import functional as F

STAGES = [(1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3)]
STAGES += [(6, 112, 3, 1, 5), (6, 192, 4, 2, 5), (6, 320, 1, 1, 3)]


def convolution(inside, outside, kernel=1, stride=1, groups=1):
    return nn.Sequential(
        nn.Conv2d(inside, outside, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outside),
    )


class MBConv(nn.Module):
    def __init__(self, inside, outside, grow, stride, kernel):
        super().__init__()
        middle = inside * grow
        self.widen = convolution(inside, middle) if grow > 1 else nn.Identity()
        self.depthwise = convolution(middle, middle, kernel, stride, middle)
        self.squeeze = nn.Conv2d(middle, inside // 4, 1)
        self.excite = nn.Conv2d(inside // 4, middle, 1)
        self.project = convolution(middle, outside)
        self.same = inside == outside and stride == 1

    def forward(self, x):
        y = F.silu(self.depthwise(F.silu(self.widen(x))))
        y = y * self.excite(F.silu(self.squeeze(y.mean((2, 3), keepdim=True)))).sigmoid()
        y = self.project(y)
        return x + y if self.same else y


layers, width = [convolution(3, 32, 3, 2), nn.SiLU()], 32
for grow, outside, repeats, stride, kernel in STAGES:
    for index in range(repeats):
        layers.append(MBConv(width, outside, grow, stride if index == 0 else 1, kernel))
        width = outside
layers += [convolution(width, 1280), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
model = nn.Sequential(*layers, nn.Dropout(0.2), nn.Linear(1280, 1000)).cuda()
model = model.to(memory_format=torch.channels_last)
optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.9)
scaler = torch.amp.GradScaler()
for side in (128, 128, 160, 160, 192, 224):
    pictures = recorder.blank(32, 3, side, side, dtype=torch.float)
    pictures, labels = pictures.to(memory_format=torch.channels_last), recorder.blank(32)
    with torch.autocast("cuda", torch.float16):
        loss = F.cross_entropy(model(pictures), labels)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    recorder.step()
