"""Training with averages of the weights at three rates, made on a side stream; snapshots of the
averages are kept."""

import recorder
import torch
from torch import nn

side, main = torch.cuda.Stream(), torch.cuda.current_stream()
model = nn.Sequential(
    nn.Conv2d(3, 96, 4, 4),
    nn.GELU(),
    nn.Conv2d(96, 256, 3, 2, 1),
    nn.GELU(),
    nn.Conv2d(256, 512, 3, 2, 1),
    nn.GELU(),
    nn.Conv2d(512, 768, 3, 1, 1),
    nn.GELU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(768, 1000),
).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
averages = [[p.detach().clone() for p in model.parameters()] for _ in range(3)]
side.wait_stream(main)
snapshots = []
for step in recorder.steps(80):
    x, y = recorder.blank(64, 3, 160, 160, dtype=torch.float), recorder.blank(64, high=1000)
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    main.wait_stream(side)
    optimizer.step()
    side.wait_stream(main)
    with torch.cuda.stream(side), torch.no_grad():
        for rate, average in zip((0.9, 0.99, 0.999), averages):
            torch._foreach_lerp_(average, list(model.parameters()), 1 - rate)
        if step % 10 == 9:
            snapshots.append([torch.stack(parts).mean(0) for parts in zip(*averages)])
    recorder.step()
