"""Validation of a segmentation model that gathers the full-size probabilities of all clips.

cause: collects
also: grows
device: 12 GiB
ends: oom
never: no_grad|inference_mode|detach|backward
"""

import torch
from torch import nn

CLASSES = 19


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Conv2d(64, CLASSES, 1)

    def forward(self, x):
        y = self.head(self.body(x))
        return nn.functional.interpolate(y, x.shape[-2:], mode="bilinear", align_corners=False)


def clips(n, frames=8, size=(512, 1024)):
    for i in range(n):
        yield i, torch.rand(frames, 3, *size, device="cuda"), torch.zeros(frames, *size).byte()


def train_one_epoch(model, opt):
    model.train()
    for _, x, y in clips(4):
        loss = nn.functional.cross_entropy(model(x), y.cuda().long())
        opt.zero_grad()
        loss.backward()
        opt.step()
        print("train", loss.item(), flush=True)


@torch.no_grad()
def validate(model):
    model.eval()
    outputs = {"probs": [], "truth": []}
    for i, x, y in clips(60):
        outputs["probs"] += [model(x).softmax(dim=1)]  # the cause
        outputs["truth"] += [y]
        print("clip", i, flush=True)
    probs = torch.cat(outputs["probs"]).cpu()
    return (probs.argmax(1) == torch.cat(outputs["truth"])).float().mean()


model = Segmenter().cuda()
opt = torch.optim.SGD(model.parameters(), lr=0.01)
train_one_epoch(model, opt)
print("accuracy", validate(model))
