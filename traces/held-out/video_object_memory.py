"""Segments a video frame by frame with a bank of memory frames that grows, as in space-time memory
networks."""

import random

import recorder
import torch
import torch.nn.functional as F
from torch import nn

rng = random.Random(10)


class Basic(nn.Module):
    def __init__(self, a, b, stride=1):
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(a, b, 3, stride, 1), nn.Conv2d(b, b, 3, 1, 1)
        self.skip = nn.Conv2d(a, b, 1, stride) if stride > 1 or a != b else None

    def forward(self, x):
        y = self.c2(F.relu(self.c1(F.relu(x))))
        return y + (x if self.skip is None else self.skip(x))


class Trunk(nn.Module):
    def __init__(self, inside):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(inside, 64, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.l1, self.l2, self.l3 = Basic(64, 128), Basic(128, 256, 2), Basic(256, 512, 2)

    def forward(self, x):
        f4 = self.l1(self.stem(x))
        f8 = self.l2(f4)
        return f4, f8, self.l3(f8)


query, memory = Trunk(3), Trunk(5)
key, value = nn.Conv2d(512, 64, 3, padding=1), nn.Conv2d(512, 512, 3, padding=1)
d16, d8, d4, last = (
    Basic(1024, 256),
    Basic(512, 256),
    Basic(384, 128),
    nn.Conv2d(128, 1, 3, padding=1),
)
for part in (query, memory, key, value, d16, d8, d4, last):
    part.half().cuda().eval().requires_grad_(False)


def read(keys, values, q):
    similarity = 2 * keys.transpose(1, 2) @ q - keys.square().sum(1)[:, :, None]
    top, index = similarity.float().topk(20, dim=1)
    affinity = torch.zeros_like(similarity).scatter_(1, index, top.softmax(1).half())
    return values @ affinity


@torch.inference_mode()
def video(frames, height, width, objects):
    keys, values, masks = None, None, []
    for i in range(frames):
        frame = torch.zeros(1, 3, height, width, dtype=torch.half).cuda(non_blocking=True)
        f4, f8, f16 = query(frame)
        k = key(f16).flatten(2)
        if keys is None:
            mask = torch.zeros(objects, 1, height, width, dtype=torch.half).cuda()
        else:
            h, w = f16.shape[-2:]
            got = read(keys, values.flatten(0, 1), k).view(objects, 512, h, w)
            x = d16(torch.cat([got, f16.expand(objects, -1, -1, -1)], 1))
            x = F.interpolate(x, size=f8.shape[-2:], mode="bilinear")
            x = d8(torch.cat([x, f8.expand(objects, -1, -1, -1)], 1))
            x = F.interpolate(x, size=f4.shape[-2:], mode="bilinear")
            x = d4(torch.cat([x, f4.expand(objects, -1, -1, -1)], 1))
            mask = F.interpolate(last(F.relu(x)), size=(height, width), mode="bilinear").sigmoid()
            background = (1 - mask).prod(0, keepdim=True)
            masks.append(torch.cat([background, mask]).argmax(0).to(torch.uint8).cpu())
        if i % 5 == 0:
            others = mask.sum(0, keepdim=True) - mask
            with_masks = torch.cat([frame.expand(objects, -1, -1, -1), mask, others], 1)
            v = value(memory(with_masks)[2]).flatten(2)[None]
            keys = k if keys is None else torch.cat([keys, k], 2)
            values = v if values is None else torch.cat([values, v], 3)
    return torch.stack(masks)


for clip in recorder.steps(6):
    video(
        rng.randrange(25, 60), rng.choice((480, 720)), rng.choice((864, 1280)), rng.randrange(1, 4)
    )
    recorder.step()
