"""Trains; a DataLoader-like prefetcher moves batches to the device ahead of time, in a thread,
with a queue that has no bound (maxsize=0).

cause: grows
also: too_large
device: 1 GiB
ends: oom
never: give this step less|smaller batch
"""

import os, queue, threading, time
import torch
import torch.nn as nn
import torch.nn.functional as F


class Prefetcher:
    """Copies batches to the device on a stream of its own, so that training never waits."""

    def __init__(self, count, batch=256, size=96):
        self.queue = queue.Queue()                      # no maxsize
        self.stream = torch.cuda.Stream()
        self.count, self.batch, self.size = count, batch, size
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    def work(self):
        images = torch.zeros(self.batch, 3, self.size, self.size).pin_memory()
        labels = torch.zeros(self.batch, dtype=torch.long).pin_memory()
        for _ in range(self.count):
            with torch.cuda.stream(self.stream):
                x = images.to("cuda", non_blocking=True)
                y = labels.to("cuda", non_blocking=True)
            self.stream.synchronize()
            self.queue.put((x, y))
            time.sleep(0.01)

    def __iter__(self):
        for _ in range(self.count):
            x, y = self.queue.get()
            x.record_stream(torch.cuda.current_stream())
            y.record_stream(torch.cuda.current_stream())
            yield x, y


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        widths = [3, 32, 64, 128]
        self.layers = nn.Sequential(*[
            nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.BatchNorm2d(b), nn.ReLU())
            for a, b in zip(widths, widths[1:])])
        self.fc = nn.Linear(128, 10)

    def forward(self, x):
        return self.fc(self.layers(x).mean((2, 3)))


def main():
    model = ConvNet().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for step, (x, y) in enumerate(Prefetcher(2000)):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.1 + float(os.environ.get("SLOW", "0")))        # augmentation, logging
        if step % 10 == 0:
            print(step, loss.item(), flush=True)


if __name__ == "__main__":
    main()
