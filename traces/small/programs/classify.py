"""Vision, inference: a ResNet-50 in half precision that answers batches of any size, as a queue of
requests hands them over, of pictures in three sizes."""

import recorder
import torch
from torch import nn
from torch.nn import functional as F


class Bottleneck(nn.Module):
    def __init__(self, inside, width, stride):
        super().__init__()
        outside = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2, self.bn3 = nn.BatchNorm2d(width), nn.BatchNorm2d(outside)
        self.conv3 = nn.Conv2d(width, outside, 1, bias=False)
        self.shortcut = nn.Sequential()
        if stride > 1 or inside != outside:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
            )

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = F.relu(self.bn2(self.conv2(y)), inplace=True)
        return F.relu(self.bn3(self.conv3(y)) + self.shortcut(x), inplace=True)


layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
layers.append(nn.MaxPool2d(3, 2, 1))
inside = 64
for width, repeats, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
    for index in range(repeats):
        layers.append(Bottleneck(inside, width, stride if index == 0 else 1))
        inside = 4 * width
layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000)]
model = nn.Sequential(*layers).cuda().half().eval()
for _ in recorder.steps(25):
    count = min(64, int(recorder.draw.paretovariate(0.7)))
    side = recorder.draw.choice((224, 224, 288, 384))
    with torch.inference_mode():
        pictures = recorder.blank(count, 3, side, side, dtype=torch.uint8)
        pictures = (pictures.half() / 255 - 0.45) / 0.225
        scores, labels = model(pictures).float().softmax(-1).topk(5)
        answer = scores.cpu(), labels.cpu()
    del pictures
    recorder.step()
