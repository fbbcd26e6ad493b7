"""Tensors that cross streams, with and without record_stream, for a while."""

import random

import torch

import gpu

gpu.install()
random.seed(1)
streams = [torch.cuda.default_stream()] + [torch.cuda.Stream() for _ in range(3)]
kept = {}
for step in range(3000):
    stream = random.choice(streams)
    with torch.cuda.stream(stream):
        size = random.choice([1, 100, 512, 4096, 1 << 16, 1 << 20, 5 << 20, 40 << 20])
        tensor = torch.empty(random.randint(1, size), dtype=torch.uint8, device="cuda")
        tensor.zero_()
    if random.random() < 0.3:
        other = random.choice(streams)
        other.wait_stream(stream)
        with torch.cuda.stream(other):
            tensor.add_(1)
        tensor.record_stream(other)
    kept[step] = tensor
    if len(kept) > 64:
        del kept[random.choice(list(kept))]
    del tensor
    if step % 500 == 0:
        gpu.check_books(seen=sum(map(gpu.rounded, gpu.storages().values())))
peak = gpu.phantom.phantom_physical_peak(0)
kept.clear()
gpu.check_nothing_is_left()
gpu.report(peak=peak)
