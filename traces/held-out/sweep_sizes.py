"""A sweep in one process: networks of many widths, depths and batch sizes, the best one's weights
kept."""

import copy
import gc
import random

import recorder
import torch
import torch.nn.functional as F
from torch import nn

rng = random.Random(64)


def network(width, depth, kind):
    if kind == "mlp":
        layers = [nn.Flatten(), nn.Linear(3 * 32 * 32, width), nn.ReLU()]
        for _ in range(depth):
            layers += [nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2)]
        return nn.Sequential(*layers, nn.Linear(width, 100))
    layers, c = [nn.Conv2d(3, width // 8, 3, padding=1)], width // 8
    for i in range(depth):
        n = min(width, c * 2) if i % 2 else c
        layers += [nn.BatchNorm2d(c), nn.ReLU(), nn.Conv2d(c, n, 3, 2 if i % 2 and i < 6 else 1, 1)]
        c = n
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, 100))


data = torch.zeros(20_000, 3, 32, 32, dtype=torch.uint8).cuda()
labels = torch.zeros(20_000, dtype=torch.long).cuda()
best, log = None, []
for trial in recorder.steps(14):
    width, depth = rng.choice((128, 256, 512, 1024, 2048)), rng.randrange(2, 9)
    batch, kind = rng.choice((64, 128, 256, 512)), rng.choice(("mlp", "conv"))
    name = rng.choice(("sgd", "adam", "rmsprop", "nadam"))
    model = network(width, depth, kind).cuda()
    optimizer = {
        "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        "adam": lambda p: torch.optim.Adam(p, 1e-3),
        "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-3, momentum=0.9),
        "nadam": lambda p: torch.optim.NAdam(p),
    }[name](model.parameters())
    order = torch.randperm(20_000, device="cuda")
    for part in order[: batch * 12].split(batch):
        x = data[part].float() / 255
        loss = F.cross_entropy(model(x), labels[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        right = sum(
            (model(x.float() / 255).argmax(1) == y).sum()
            for x, y in zip(data[-4000:].split(1000), labels[-4000:].split(1000))
        )
    log.append((width, depth, batch, kind, name, right.item()))
    if best is None or rng.random() < 0.3:
        best = copy.deepcopy(model.state_dict())
    del model, optimizer, loss
    if trial % 4 == 3:
        gc.collect()
        torch.cuda.empty_cache()
    recorder.step()
