"""Two devices, the current one often the other, and copies between them."""

import torch

import gpu

gpu.install()
kept = []
for step in range(200):
    device = step % 2
    with torch.cuda.device(1 - device):
        here = torch.empty(1000 * (step + 1), dtype=torch.uint8, device=f"cuda:{device}")
    there = here.to(f"cuda:{1 - device}")
    assert there.device.index == 1 - device
    kept.append((here, there))
    if step > 50:
        kept.pop(0)
del here, there
for device in range(2):
    gpu.check_books(device, seen=sum(map(gpu.rounded, gpu.storages(device).values())))
kept.clear()
for device in range(2):
    gpu.check_nothing_is_left(device)
gpu.report(devices=torch.cuda.device_count())
