"""DataParallel on two devices: the model is copied to the second at every step, the batch split,
gradients added on the first, all without NCCL (the stand-in has one rank). The replicas' threads
take turns, so that forward passes are the same at each recording; the two threads of the backward
pass are autograd's own, and are not."""

import threading

import recorder
import torch
from torch import nn
from torch._utils import (
    _flatten_dense_tensors,
    _reorder_tensors_as,
    _take_tensors,
    _unflatten_dense_tensors,
)
from torch.nn import functional as F

if torch.cuda.device_count() < 2:
    raise SystemExit("data_parallel needs two devices: PHANTOM_DEVICES=2")


class Taking(threading.Thread):
    """A thread that is waited for as soon as it is started."""

    def start(self):
        super().start()
        self.join()


nn.parallel.parallel_apply.__globals__["threading"] = type(
    "threading", (), {"Thread": Taking, "Lock": threading.Lock}
)


def broadcast_coalesced(tensors, devices, buffer_size=10 << 20):
    """What torch's own does where there is no NCCL, in Python."""
    copies = [list(tensors)] + [[] for _ in devices[1:]]
    for chunk in _take_tensors(tensors, buffer_size):
        flat = _flatten_dense_tensors(chunk)
        for device, copy in zip(devices[1:], copies[1:]):
            there = torch.empty_like(flat, device=f"cuda:{device}").copy_(flat, non_blocking=True)
            copy += _unflatten_dense_tensors(there, chunk)
    return copies[:1] + [list(_reorder_tensors_as(copy, tensors)) for copy in copies[1:]]


nn.parallel.comm.broadcast_coalesced = broadcast_coalesced
torch.cuda.nccl.is_available = lambda tensors: False


class Block(nn.Module):
    def __init__(self, inside, outside, stride):
        super().__init__()
        self.one = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.two = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outside), nn.BatchNorm2d(outside)
        self.short = nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x):
        y = self.norm2(self.two(F.relu(self.norm1(self.one(x)))))
        return F.relu(y + self.short(x))


widths = (64, 64, 128, 128, 256, 256, 512, 512)
blocks = [
    Block(inside, outside, 1 + (inside != outside))
    for inside, outside in zip((64, *widths), widths)
]
model = nn.Sequential(
    nn.Conv2d(3, 64, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(2), *blocks, nn.AdaptiveAvgPool2d(1),
    nn.Flatten(), nn.Linear(512, 1000),
).cuda()
parallel = nn.DataParallel(model, device_ids=[0, 1])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in recorder.steps(5):
    pictures, labels = recorder.blank(64, 3, 224, 224, dtype=torch.float), recorder.blank(64)
    loss = F.cross_entropy(parallel(pictures), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    recorder.step()
