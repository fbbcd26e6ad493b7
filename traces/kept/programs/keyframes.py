"""Depth from a moving camera: keyframes keep their features; each new frame sweeps planes through
the latest of them, and its depth and cost volume's minimum are kept."""

import recorder
import torch
from torch import nn
from torch.nn import functional as F

H, W, PLANES, C = 120, 160, 64, 32
features = nn.Sequential(nn.Conv2d(3, 32, 5, 2, 2), nn.ReLU(), nn.Conv2d(32, C, 3, 2, 1)).cuda()
regular = nn.Sequential(nn.Conv3d(C, 8, 3, 1, 1), nn.ReLU(), nn.Conv3d(8, 1, 3, 1, 1)).cuda()
depths = torch.linspace(0.5, 10, PLANES, device="cuda")
keyframes, kept = [], []
base = F.affine_grid(torch.eye(2, 3, device="cuda")[None], (1, 1, H, W), align_corners=False)
with torch.no_grad():
    for number in recorder.steps(70):
        picture = recorder.blank(1, 3, 4 * H, 4 * W, dtype=torch.float)
        here = features(picture)
        if keyframes:
            total, squares = (
                here[:, :, None].expand(-1, -1, PLANES, -1, -1).clone(),
                here.square()[:, :, None],
            )
            for other, _ in keyframes[-4:]:
                grid = base + 1 / depths[:, None, None, None]
                warped = F.grid_sample(other.expand(PLANES, -1, -1, -1), grid, align_corners=False)
                warped = warped.transpose(0, 1)[None]
                total, squares = total + warped, squares + warped.square()
            cost = regular(squares / 5 - (total / 5).square())[:, 0].softmax(1)
            depth = (cost * depths[:, None, None]).sum(1)
            kept.append((F.interpolate(depth[None], scale_factor=4), cost.amax(1)))
        if number % 3 == 0:
            keyframes.append((here, picture))
        recorder.step()
