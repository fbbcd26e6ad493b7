"""A low-latency server captures one CUDA graph for each shape of request and keeps them all.

cause: cuda_graphs
also: cache
device: 8 GiB
ends: oom
never: no_grad|inference_mode|smaller model|backward
"""
import random
import time

import torch
import torch.nn as nn

random.seed(3)


class Ranker(nn.Module):
    def __init__(self, dim=1024):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, 4 * dim), nn.GELU(),
            nn.Linear(4 * dim, dim), nn.LayerNorm(dim), nn.Linear(dim, 1),
        )

    def forward(self, items):
        return self.layers(items).squeeze(-1)


class GraphRunner:
    def __init__(self, model):
        self.model = model
        self.captured = {}

    def capture(self, shape):
        inputs = torch.zeros(shape, device="cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.model(inputs)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = self.model(inputs)  # the cause
        return graph, inputs, outputs

    def __call__(self, items):
        shape = tuple(items.shape)
        if shape not in self.captured:
            self.captured[shape] = self.capture(shape)  # the cause
        graph, inputs, outputs = self.captured[shape]
        inputs.copy_(items)
        graph.replay()
        return outputs.clone()


with torch.inference_mode():
    run = GraphRunner(Ranker().cuda().eval())
    for request in range(2000):
        users, items = random.randint(4, 16), random.randint(100, 800)
        begin = time.perf_counter()
        scores = run(torch.zeros(users, items, 1024, device="cuda"))
        took = 1000 * (time.perf_counter() - begin)
        if request % 5 == 0:
            print(f"{request}: {users}x{items} in {took:.1f} ms", flush=True)
