"""CNN classifier with hard-example mining: the hardest sample of each batch is remembered.

cause: grows
device: 1 GiB
ends: oom
never: no_grad|smaller batch|checkpoint
"""
import dataclasses
import torch
from torch import nn
import torch.nn.functional as F


@dataclasses.dataclass
class HardExample:
    image: torch.Tensor
    label: int
    step: int


class Miner:
    def __init__(self, per_batch=2):
        self.per_batch = per_batch
        self.examples = []

    def update(self, images, labels, step):
        for i in range(self.per_batch):
            self.examples.append(HardExample(images[i], i, step))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        widths = [3, 32, 64, 128]
        self.blocks = nn.Sequential(*[
            nn.Sequential(
                nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2)
            )
            for a, b in zip(widths, widths[1:])])
        self.head = nn.Linear(128, 100)

    def forward(self, x):
        return self.head(self.blocks(x).mean((2, 3)))


def batches(n):
    for _ in range(n):
        yield torch.zeros(64, 3, 128, 128), torch.zeros(64, dtype=torch.long)


def main():
    net = Net().cuda()
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    miner = Miner()
    for step, (images, labels) in enumerate(batches(2000)):
        images = images.to("cuda", non_blocking=True)  # the cause
        labels = labels.to("cuda", non_blocking=True)
        loss = F.cross_entropy(net(images), labels)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        miner.update(images, labels, step)


main()
