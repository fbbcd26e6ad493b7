"""Reading number plates: a detector of the next frame on one stream, a reader of the last frame's
crops on another."""

import random

import recorder
import torch
import torch.nn.functional as F
from torch import nn

rng = random.Random(404)


def dw(a, b, s):
    return nn.Sequential(
        nn.Conv2d(a, a, 3, s, 1, groups=a, bias=False),
        nn.BatchNorm2d(a),
        nn.ReLU6(True),
        nn.Conv2d(a, b, 1, bias=False),
        nn.BatchNorm2d(b),
        nn.ReLU6(True),
    )


detector = (
    nn.Sequential(
        nn.Conv2d(3, 32, 3, 2, 1),
        nn.ReLU6(True),
        dw(32, 64, 1),
        dw(64, 128, 2),
        dw(128, 128, 1),
        dw(128, 256, 2),
        dw(256, 256, 1),
        dw(256, 512, 2),
        *[dw(512, 512, 1) for _ in range(5)],
        nn.Conv2d(512, 5, 1),
    )
    .cuda()
    .eval()
)


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.Sequential(
            nn.Conv2d(1, 64, 3, 1, 1),
            nn.ReLU(True),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 128, 3, 1, 1),
            nn.ReLU(True),
            nn.MaxPool2d(2),
            nn.Conv2d(128, 256, 3, 1, 1),
            nn.ReLU(True),
            nn.MaxPool2d((2, 1)),
            nn.Conv2d(256, 512, 3, 1, 1),
            nn.ReLU(True),
            nn.AdaptiveAvgPool2d((1, 32)),
        )
        self.rnn = nn.LSTM(512, 256, 2, bidirectional=True, batch_first=True)
        self.out = nn.Linear(512, 38)

    def forward(self, x):
        x = self.convs(x).squeeze(2).transpose(1, 2)
        return self.out(self.rnn(x)[0]).argmax(-1)


reader = Reader().cuda().eval()
finding, reading = torch.cuda.Stream(), torch.cuda.Stream()


@torch.inference_mode()
def find(frame):
    with torch.cuda.stream(finding):
        picture = frame.cuda(non_blocking=True).float().div(255)
        heat = detector(picture)[0]
        score, where = heat[4].flatten().sigmoid().topk(20)
        boxes = heat[:4].flatten(1)[:, where]
        done = finding.record_event()
    return picture, boxes, score, done


@torch.inference_mode()
def read(picture, boxes, score, done):
    done.synchronize()
    count = rng.randrange(0, 9)
    if count == 0:
        return None
    with torch.cuda.stream(reading):
        reading.wait_event(done)
        for t in (picture, boxes):
            t.record_stream(reading)
        theta = torch.zeros(count, 2, 3, device="cuda")
        theta[:, 0, 0], theta[:, 1, 1] = boxes[2, :count], boxes[3, :count]
        theta[:, 0, 2], theta[:, 1, 2] = boxes[0, :count], boxes[1, :count]
        grid = F.affine_grid(theta, (count, 3, 32, 128), align_corners=False)
        crops = F.grid_sample(picture.expand(count, -1, -1, -1), grid, align_corners=False).mean(
            1, keepdim=True
        )
        return reader(crops).to("cpu", non_blocking=True)


frames = [
    torch.zeros(1, 3, h, w, dtype=torch.uint8).pin_memory() for h, w in ((540, 960), (720, 1280))
]
last, plates = None, []
for step in recorder.steps(30):
    camera = frames[rng.randrange(2)]
    found = find(camera)
    if last is not None:
        plates.append(read(*last))
    last = found
    if step % 10 == 9:
        torch.cuda.synchronize()
        plates.clear()
    recorder.step()
