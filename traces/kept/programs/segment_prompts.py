"""Pictures are encoded once, the embedding and two fine maps kept; then clicks are answered from
what is kept, and the masks are kept as well."""

import recorder
import torch
from torch import nn
from torch.nn import functional as F

stem = nn.Sequential(nn.Conv2d(3, 96, 7, 4, 3), nn.GELU()).half().cuda()
stages = (
    nn.ModuleList(
        [
            nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.GELU(), nn.Conv2d(b, b, 3, 1, 1), nn.GELU())
            for a, b in ((96, 192), (192, 384))
        ]
    )
    .half()
    .cuda()
)
necks = (
    nn.ModuleList([nn.Conv2d(96, 32, 1), nn.Conv2d(192, 64, 1), nn.Conv2d(384, 256, 1)])
    .half()
    .cuda()
)
click, up1, up2 = (
    nn.Linear(2, 256).half().cuda(),
    nn.ConvTranspose2d(256, 64, 2, 2).half().cuda(),
    nn.ConvTranspose2d(64, 32, 2, 2).half().cuda(),
)
pictures, masks = [], []
with torch.inference_mode():
    for step in recorder.steps(170):
        x = recorder.blank(
            1, 3, *recorder.draw.choice([(1008, 1504), (1200, 1600), (960, 720)]), dtype=torch.half
        )
        fine = stem(x)
        middle = stages[0](fine)
        coarse = stages[1](middle)
        pictures.append([neck(y) for neck, y in zip(necks, (fine, middle, coarse))])
        if step % 3 == 0:
            a, b, c = recorder.draw.choice(pictures)
            for _ in range(3):
                prompt = click(recorder.blank(1, 2, dtype=torch.half))
                y = up2(F.gelu(up1(c + prompt[..., None, None]) + b)) + a
                y = F.interpolate(y.sum(1, keepdim=True), scale_factor=4, mode="bilinear")
                masks.append((y > 0, y.float().amax()))
        recorder.step()
