"""Many CUDA graphs alive at once, as a server keeps one for each shape: each is captured into a
pool of its own, all are replayed, then all go."""

import sys

import torch

import gpu

gpu.install()
x = torch.zeros(1 << 20, device="cuda")
graphs, outputs = [], []
for number in range(int(sys.argv[1])):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # A large block and small ones; some end with the capture.
        large = x * number + 1
        outputs += [large, torch.cat([large[:1000], x[:1000]]).relu()]
    graphs.append(graph)
gpu.check_books()
held = gpu.stats().captured

for graph in graphs:
    graph.replay()
torch.cuda.synchronize()
gpu.check_books()
# What one writes is no other's.
spans = sorted(
    (output.data_ptr(), output.data_ptr() + output.untyped_storage().nbytes()) for output in outputs
)
assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:]))

del graph, graphs, large, outputs, x
gpu.check_nothing_is_left()
assert gpu.stats().captured == 0, gpu.stats().captured
gpu.report(graphs=int(sys.argv[1]), held=held)
