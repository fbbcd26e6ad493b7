"""A loader that prefetches on a stream of its own, with events and no record_stream: before a batch
is given up, the loader's stream waits for the step that used it. Segmentation of pictures, which
are made float, normalised and turned on the loader's stream."""

import recorder
import torch
from torch import nn
from torch.nn import functional as F


class Loader:
    def __init__(self, batches):
        self.batches, self.stream = iter(batches), torch.cuda.Stream()
        self.mean = torch.full((3, 1, 1), 0.5, device="cuda")
        self.stream.wait_stream(torch.cuda.current_stream())
        self.used = torch.cuda.Event()
        self.next = self.load()

    def load(self):
        pictures, masks = next(self.batches, (None, None))
        if pictures is None:
            return None
        with torch.cuda.stream(self.stream):
            pictures = pictures.pin_memory().cuda(non_blocking=True)
            masks = masks.pin_memory().cuda(non_blocking=True)
            pictures = (pictures.float() / 255 - self.mean) / self.mean
            if recorder.draw.random() < 0.5:
                pictures, masks = pictures.flip(-1), masks.flip(-1)
            return pictures.contiguous(), masks.long(), self.stream.record_event()

    def __iter__(self):
        while self.next is not None:
            *batch, ready = self.next
            torch.cuda.current_stream().wait_event(ready)
            self.next = self.load()
            yield batch
            self.used.record()
            # Whatever the stream does next with the batch's memory comes after the step.
            self.stream.wait_event(self.used)
            batch.clear()


def block(inside, outside):
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(),
        nn.Conv2d(outside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(),
    )


class Network(nn.Module):
    def __init__(self, widths=(32, 64, 128, 256)):
        super().__init__()
        self.down = nn.ModuleList(
            block(inside, outside) for inside, outside in zip((3, *widths), widths)
        )
        self.up = nn.ModuleList(
            block(inside + outside, outside)
            for inside, outside in zip(widths[:0:-1], widths[-2::-1])
        )
        self.last = nn.Conv2d(widths[0], 21, 1)

    def forward(self, x):
        passed = []
        for index, down in enumerate(self.down):
            x = down(x if index == 0 else F.max_pool2d(x, 2))
            passed.append(x)
        for up, other in zip(self.up, passed[-2::-1]):
            x = F.interpolate(x, size=other.shape[-2:])
            x = up(torch.cat([x, other], 1))
        return self.last(x)


def batches(count):
    for _ in recorder.steps(count):
        side, amount = recorder.draw.randrange(192, 321, 32), recorder.draw.randint(4, 8)
        yield (
            torch.zeros(amount, 3, side, side, dtype=torch.uint8),
            torch.zeros(amount, side, side, dtype=torch.uint8),
        )


model = Network().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for pictures, masks in Loader(batches(16)):
    loss = F.cross_entropy(model(pictures), masks)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    del pictures, masks, loss
    recorder.step()
