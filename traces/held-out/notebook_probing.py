"""A long notebook session: activations of a model kept cell by cell, probes fitted, things
overwritten and deleted."""

import random

import recorder
import torch
import torch.nn.functional as F
from torch import nn

rng = random.Random(1001)
DIM, LAYERS = 1024, 12
with torch.device("cuda"):
    embed = nn.Embedding(32000, DIM)
    layers = nn.ModuleList(
        nn.TransformerEncoderLayer(DIM, 16, 4096, batch_first=True, norm_first=True)
        for _ in range(LAYERS)
    )
layers.eval()
kept, results = {}, {}


def activations(rows, length, wanted):
    out = {}
    hooks = [
        layers[i].register_forward_hook(lambda m, a, y, i=i: out.__setitem__(i, y)) for i in wanted
    ]
    with torch.no_grad():
        x = embed(torch.zeros(rows, length, dtype=torch.long).cuda())
        for layer in layers:
            x = layer(x)
    for h in hooks:
        h.remove()
    return out


def collect(name):
    acts = activations(
        rng.choice((16, 24, 32)), rng.choice((128, 200, 256)), rng.sample(range(LAYERS), 4)
    )
    kept[name] = acts


def probe(name):
    global last, optimizer
    x = torch.cat([a.mean(1) for a in kept[name].values()], 1)
    last = nn.Sequential(nn.Linear(x.shape[1], 512), nn.ReLU(), nn.Linear(512, 2)).cuda()
    optimizer = torch.optim.Adam(last.parameters(), lr=1e-3)
    y = torch.zeros(len(x), dtype=torch.long, device="cuda")
    for _ in range(10):
        loss = F.cross_entropy(last(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    results[name] = (last(x), loss)


def similar(a, b):
    def cka(x, y):
        x, y = x.flatten(0, 1)[:2000], y.flatten(0, 1)[:2000]
        x, y = x - x.mean(0), y - y.mean(0)
        return (x.T @ y).square().sum() / ((x.T @ x).norm() * (y.T @ y).norm())

    return torch.stack(
        [torch.stack([cka(x, y) for y in kept[b].values()]) for x in kept[a].values()]
    )


def patched(name):
    source = next(iter(kept[name].values()))
    scores = []
    for i in range(0, LAYERS, 3):

        def swap(m, a, y):
            y = y.clone()
            y[:, 5] = source[: y.shape[0], 5][:1]
            return y

        h = layers[i].register_forward_hook(swap)
        with torch.no_grad():
            x = embed(torch.zeros(8, 64, dtype=torch.long).cuda())
            for layer in layers:
                x = layer(x)
        scores.append(x[:, -1] @ embed.weight.T)
        h.remove()
    results["patch " + name] = scores


def saliency():
    x = embed(torch.zeros(4, 128, dtype=torch.long).cuda()).detach().requires_grad_()
    y = x
    for layer in layers:
        y = layer(y)
    y[:, -1].sum().backward()
    results["saliency"] = x.grad.norm(dim=-1)
    layers.zero_grad()
    embed.zero_grad()


cells = (
    "collect probe collect similar patched collect probe saliency delete collect"
    " similar collect probe patched collect delete probe saliency collect similar"
).split()
for step in recorder.steps(20):
    cell = cells[step % len(cells)]
    name = rng.choice(list(kept)) if kept else None
    if cell == "collect" or not kept:
        collect(rng.choice("abcdef"))
    elif cell == "probe":
        probe(name)
    elif cell == "similar":
        results["cka"] = similar(name, rng.choice(list(kept)))
    elif cell == "patched":
        patched(name)
    elif cell == "saliency":
        saliency()
    elif cell == "delete":
        del kept[name]
        torch.cuda.empty_cache()
    recorder.step()
