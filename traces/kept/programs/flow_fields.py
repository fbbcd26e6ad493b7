"""Optical flow between the frames of a video, correlations in a pyramid and eight refinements; the
fields are kept in half precision, the confidence with them."""

import recorder
import torch
from torch import nn
from torch.nn import functional as F

H, W = 344, 616
encoder = nn.Sequential(
    nn.Conv2d(3, 64, 7, 2, 3),
    nn.ReLU(),
    nn.Conv2d(64, 96, 3, 2, 1),
    nn.ReLU(),
    nn.Conv2d(96, 128, 3, 2, 1),
).cuda()
update = nn.Sequential(
    nn.Conv2d(128 + 2 + 3 * 9, 96, 3, 1, 1), nn.ReLU(), nn.Conv2d(96, 3, 3, 1, 1)
).cuda()
h, w = H // 8, W // 8
near = torch.stack(
    torch.meshgrid(torch.arange(3.0) - 1, torch.arange(3.0) - 1, indexing="ij"), -1
).cuda()
grid = torch.stack(
    torch.meshgrid(torch.arange(h) * 1.0, torch.arange(w) * 1.0, indexing="ij")[::-1], -1
).cuda()
fields, before = [], None
with torch.no_grad():
    for _ in recorder.steps(48):
        now = encoder(recorder.blank(1, 3, H, W, dtype=torch.float))
        if before is not None:
            costs = [
                torch.einsum("cx,cy->xy", before[0].flatten(1), now[0].flatten(1)).view(
                    h * w, 1, h, w
                )
                / 11
            ]
            for _ in range(2):
                costs.append(F.avg_pool2d(costs[-1], 2))
            flow = torch.zeros(h, w, 2, device="cuda")
            for _ in range(8):
                seen = []
                for level, cost in enumerate(costs):
                    at = (grid + flow).view(-1, 1, 1, 2) / 2**level + near
                    at = (
                        2
                        * at
                        / torch.tensor([cost.shape[3] - 1.0, cost.shape[2] - 1.0], device="cuda")
                        - 1
                    )
                    seen.append(F.grid_sample(cost, at, align_corners=True).view(h, w, 9))
                x = torch.cat(
                    [before[0], flow.permute(2, 0, 1), *(s.permute(2, 0, 1) for s in seen)]
                )[None]
                delta = update(x)[0]
                flow = flow + delta[:2].permute(1, 2, 0)
            full = F.interpolate(flow.permute(2, 0, 1)[None], scale_factor=8, mode="bilinear") * 8
            fields.append(
                (full.half(), F.interpolate(delta[None, 2:], scale_factor=8).sigmoid().half())
            )
        before = now
        recorder.step()
