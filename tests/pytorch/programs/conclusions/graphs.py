"""A graph for each shape, each with a pool of its own."""

import torch

from common import Training, is_killed

training = Training(width=512)
for step in range(3):
    training.step()
graphs = []
with torch.no_grad():
    for number in range(40):
        batch = torch.randn(1024 + 16 * number, 512, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = training.model(batch)
        graphs.append((graph, batch, output))
is_killed()
