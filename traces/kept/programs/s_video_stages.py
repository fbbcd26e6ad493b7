"""Video in three stages, each on its stream: frames arrive, are interpolated to twice the rate, and
are packed into bytes, which are kept for the writer."""

import recorder
import torch
from torch import nn
from torch.nn import functional as F

arrive, pack, main = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.current_stream()
flow = nn.Sequential(
    nn.Conv2d(6, 48, 5, 4, 2),
    nn.PReLU(),
    nn.Conv2d(48, 48, 3, 1, 1),
    nn.PReLU(),
    nn.Conv2d(48, 5, 3, 1, 1),
).cuda()
H, W = 720, 1284
grid = F.affine_grid(torch.eye(2, 3)[None], (1, 1, H, W), align_corners=False).cuda()
written, before = [], None
with torch.no_grad():
    for _ in recorder.steps(100):
        host = torch.zeros(1, H, W, 3, dtype=torch.uint8).pin_memory()
        with torch.cuda.stream(arrive):
            frame = host.cuda(non_blocking=True).permute(0, 3, 1, 2).float() / 255
        main.wait_stream(arrive)
        frame.record_stream(main)
        if before is not None:
            y = F.interpolate(flow(torch.cat([before, frame], 1)), size=(H, W), mode="bilinear")
            a = F.grid_sample(before, grid + y[:, :2].permute(0, 2, 3, 1), align_corners=False)
            b = F.grid_sample(frame, grid + y[:, 2:4].permute(0, 2, 3, 1), align_corners=False)
            weight = y[:, 4:].sigmoid()
            middle = weight * a + (1 - weight) * b
            pack.wait_stream(main)
            with torch.cuda.stream(pack):
                for picture in (middle, frame):
                    picture.record_stream(pack)
                    written.append((picture.clamp(0, 1) * 255).byte())
        before = frame
        recorder.step()
