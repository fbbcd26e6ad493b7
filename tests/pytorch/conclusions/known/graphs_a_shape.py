"""A CUDA graph is captured for each of many batch sizes, each with a pool of its own.

cause: cuda_graphs
also: cache
device: 8 GiB
ends: killed
never: no_grad|inference_mode
"""

import os
import signal

import torch
from torch import nn


def layers(width, count):
    return nn.Sequential(*[m for _ in range(count) for m in (nn.Linear(width, width), nn.GELU())])


model = layers(1024, 4).cuda().eval()
graphs = {}
with torch.no_grad():
    for size in range(64, 64 * 41, 64):
        x = torch.randn(size, 1024, device="cuda")
        graph = torch.cuda.CUDAGraph()
        model(x)
        with torch.cuda.graph(graph):
            y = model(x)
        graphs[size] = graph, x, y
os.kill(os.getpid(), signal.SIGKILL)
