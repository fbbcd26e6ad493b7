"""CUDA graphs: allocations inside captures, replays, release before the outputs are freed, eager
work in between."""

import torch

import gpu

gpu.install()
x = torch.zeros(1 << 20, device="cuda")
outputs, graphs = [], []
pool = torch.cuda.graph_pool_handle()
for share in (False, True, True):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * 2 + 1
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool if share else None):
        parts = [x * n for n in range(8)]
        y = torch.cat(parts).relu()
        del parts
    graphs.append(graph)
    outputs.append(y)
    for _ in range(3):
        graph.replay()
        torch.empty(3 << 20, device="cuda").zero_()
captured = {y.data_ptr(): y.untyped_storage().nbytes() for y in outputs}
# Eager tensors must stay clear of what a replay writes.
eager = [torch.empty(8 << 20, dtype=torch.uint8, device="cuda") for _ in range(64)]
for tensor in eager:
    for start, length in captured.items():
        assert tensor.data_ptr() + (8 << 20) <= start or start + length <= tensor.data_ptr()
for graph in graphs:
    graph.replay()
torch.cuda.synchronize()
gpu.check_books()
del graph, graphs
gpu.check_books()
del outputs, eager, tensor, x, y
gpu.check_nothing_is_left(captured=True)
gpu.report(captures=3)
