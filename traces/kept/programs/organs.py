"""Organs in volumes by a sliding window in three dimensions with a Gaussian weight: the
probabilities of each patient are kept for the ensemble with the next fold."""

import recorder
import torch
from torch import nn

net = nn.Sequential(
    nn.Conv3d(1, 16, 3, 1, 1),
    nn.InstanceNorm3d(16),
    nn.LeakyReLU(),
    nn.Conv3d(16, 48, 3, 2, 1),
    nn.InstanceNorm3d(48),
    nn.LeakyReLU(),
    nn.ConvTranspose3d(48, 16, 2, 2),
    nn.LeakyReLU(),
    nn.Conv3d(16, 14, 1),
).cuda()
WINDOW = (96, 96, 64)
axes = [torch.exp(-(torch.linspace(-2, 2, w, device="cuda") ** 2)) for w in WINDOW]
weight = axes[0][:, None, None] * axes[1][:, None] * axes[2]
patients = []
with torch.inference_mode():
    for _ in recorder.steps(40):
        shape = [recorder.draw.randrange(w, 2 * w) for w in WINDOW]
        volume = recorder.blank(1, 1, *shape, dtype=torch.float)
        total, count = torch.zeros(14, *shape, device="cuda"), torch.zeros(shape, device="cuda")
        starts = [sorted({0, (s - w) // 2, s - w}) for s, w in zip(shape, WINDOW)]
        for a in starts[0]:
            for b in starts[1]:
                for c in starts[2]:
                    at = (..., slice(a, a + 96), slice(b, b + 96), slice(c, c + 64))
                    total[at] += net(volume[at])[0] * weight
                    count[at] += weight
        patients.append((total / count).softmax(0).half())
        recorder.step()
