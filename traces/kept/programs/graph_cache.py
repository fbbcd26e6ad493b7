"""A graph network, inference layer by layer: the embeddings of all nodes are made in parts that are
kept and put together, layer after layer; hot nodes have a cache of samples."""

import recorder
import torch
from torch import nn

NODES, WIDTHS = 310_000, [100, 256, 256, 172]
x = torch.zeros(NODES, WIDTHS[0], device="cuda", dtype=torch.half)
cache = {}
with torch.no_grad():
    for inside, outside in zip(WIDTHS, WIDTHS[1:]):
        own, others = (
            nn.Linear(inside, outside).half().cuda(),
            nn.Linear(inside, outside).half().cuda(),
        )
        parts, at = [], 0
        while at < NODES:
            count = min(recorder.draw.randrange(6000, 14_000), NODES - at)
            near = recorder.blank(count, 15, high=NODES)
            if recorder.draw.random() < 0.3:
                cache[at] = near[::4].clone()
            gathered = x[near]
            weight = (gathered * x[at : at + count, None]).sum(-1, keepdim=True).softmax(1)
            parts.append((own(x[at : at + count]) + others((weight * gathered).sum(1))).relu())
            at += count
            recorder.step()
        x = torch.cat(parts)
x.float().norm(dim=1).mean().item()
