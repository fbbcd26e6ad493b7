"""A text classifier served from CUDA graphs, one captured for each shape that comes.

cause: cuda_graphs
also: cache
device: 6 GiB
ends: oom
never: no_grad|inference_mode|detach|backward|optimizer
"""

import random

import torch
from torch import nn


class Classifier(nn.Module):
    def __init__(self, width=1024, layers=4):
        super().__init__()
        self.embed = nn.Embedding(30000, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(),
                          nn.Linear(4 * width, width))
            for _ in range(layers)
        )  # fmt: skip
        self.out = nn.Linear(width, 50)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)  # the cause
        return self.out(x.mean(1))


class Runner:
    def __init__(self, model):
        self.model, self.captured = model, {}

    def capture(self, shape):
        ids = torch.zeros(shape, dtype=torch.long, device="cuda")
        self.model(ids)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = self.model(ids)  # the cause
        return graph, ids, out

    def __call__(self, ids):
        if ids.shape not in self.captured:
            self.captured[ids.shape] = self.capture(ids.shape)  # the cause
        graph, buffer, out = self.captured[ids.shape]
        buffer.copy_(ids)
        graph.replay()
        return out.clone()


random.seed(1)
with torch.inference_mode():
    runner = Runner(Classifier().cuda().eval())
    for request in range(2000):
        length = random.randrange(100, 512)
        answer = runner(torch.randint(0, 30000, (32, length), device="cuda"))
        if request % 3 == 0:
            print(request, length, answer.argmax(-1)[:4].tolist(), flush=True)
