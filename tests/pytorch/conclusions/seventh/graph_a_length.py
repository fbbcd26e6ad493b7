"""A CUDA graph for each length of a request, each with memory of its own.

cause: cuda_graphs
device: 1GiB
ends: oom
never: run the same work once before
"""


import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x, past=None):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=1), torch.cat([past[1], v], dim=1)
        else:
            k, v = k.contiguous(), v.contiguous()
        return x + self.out(torch.softmax(q @ k.transpose(1, 2), dim=-1) @ v), (k, v)


class Model(nn.Module):
    def __init__(self, vocabulary=16000, d=512, layers=6):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(layers))
        self.head = nn.Linear(d, vocabulary)

    def forward(self, ids, past=None):
        x, cache = self.embedding(ids), []
        for number, block in enumerate(self.blocks):
            x, kept = block(x, past[number] if past else None)
            cache.append(kept)
        return self.head(x), cache


model = Model().cuda().eval().half()
graphs = {}


def run(length):
    if length not in graphs:
        ids = torch.zeros(1, length, dtype=torch.long, device="cuda")
        side = torch.cuda.Stream()
        with torch.cuda.stream(side), torch.no_grad():
            model(ids)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            out = model(ids)[0]  # the cause
        graphs[length] = graph, ids, out
    graphs[length][0].replay()


for request in range(1000):
    run(64 + request)
