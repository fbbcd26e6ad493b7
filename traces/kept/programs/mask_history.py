"""Pruning by magnitude over rounds: masks and the surviving weights of each round are kept beside
the first weights, to which the network is rewound."""

import recorder
import torch
from torch import nn

model = nn.Sequential(
    nn.Conv2d(3, 128, 3, 2, 1),
    nn.ReLU(),
    nn.Conv2d(128, 256, 3, 2, 1),
    nn.ReLU(),
    nn.Conv2d(256, 512, 3, 2, 1),
    nn.ReLU(),
    nn.Conv2d(512, 512, 3, 1, 1),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(512 * 16, 1500),
    nn.ReLU(),
    nn.Linear(1500, 100),
).cuda()
weights = [p for p in model.parameters() if p.dim() > 1]
first = [w.detach().clone() for w in weights]
masks, history = [torch.ones_like(w, dtype=torch.bool) for w in weights], []
for _ in recorder.steps(14):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(5):
        loss = nn.functional.cross_entropy(
            model(recorder.blank(300, 3, 32, 32, dtype=torch.float)), recorder.blank(300, high=100)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for w, m in zip(weights, masks):
                w.mul_(m)
        recorder.step()
    with torch.no_grad():
        history.append([(m, (w * m).half()) for w, m in zip(weights, masks)])
        new = []
        for w, m, f in zip(weights, masks, first):
            least = w.abs().flatten().kthvalue(max(1, w.numel() // 5))[0]
            new.append(m & (w.abs() > least))
            w.copy_(f * new[-1])
        masks = new
