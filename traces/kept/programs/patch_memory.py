"""Faults in products: patches of good ones fill a memory, which is thinned by greedy choice of the
farthest; then products are scored by the nearest patch, and their maps kept."""

import recorder
import torch
from torch import nn
from torch.nn import functional as F

low = nn.Sequential(
    nn.Conv2d(3, 128, 7, 4, 3), nn.ReLU(), nn.Conv2d(128, 384, 3, 2, 1), nn.ReLU()
).cuda()
high = nn.Sequential(nn.Conv2d(384, 700, 3, 2, 1), nn.ReLU()).cuda()


def patches(count):
    a = low(recorder.blank(count, 3, 232, 232, dtype=torch.float))
    b = F.interpolate(high(a), size=a.shape[2:], mode="bilinear")
    return F.avg_pool2d(torch.cat([a, b], 1), 3, 1, 1).permute(0, 2, 3, 1).flatten(0, 2)


with torch.no_grad():
    memory = []
    for _ in recorder.steps(34):
        memory.append(patches(7))
        recorder.step()
    memory = torch.cat(memory)
    small = memory @ torch.randn(1084, 128, device="cuda")
    chosen, far = [], torch.full((len(small),), 1e9, device="cuda")
    for _ in range(120):
        far = torch.minimum(far, (small - small[far.argmax().clamp(0, 0)]).norm(dim=1))
        chosen.append(far.argmax().clamp(0, 0))
    core = memory[torch.stack(chosen)]
    del memory
    maps = []
    for _ in recorder.steps(40):
        near = torch.cdist(patches(8), core).topk(3, 1, largest=False)[0]
        maps.append(F.interpolate(near[:, 0].view(8, 1, 29, 29), size=232, mode="bilinear"))
        recorder.step()
