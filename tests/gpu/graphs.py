"""(c) Captured graphs replayed among eager work: the same results as without capture, and no memory
of theirs in eager hands."""

from __future__ import annotations

from typing import Any, Dict, List

import torch
from torch import nn

import machine
from machine import MIB


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 16)
    ).cuda()


def iteration(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    optimizer.zero_grad(set_to_none=True)
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


class Canaries:
    """Eager tensors that come and go between replays: each holds its own number until it is
    dropped."""

    def __init__(self) -> None:
        self.blocks: List[torch.Tensor] = []
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        self.count = 0

    def stir(self) -> None:
        for _ in range(12):
            size = (1 << (7 + self.count * 5 % 17)) + 128 * (self.count % 3)
            self.blocks.append(torch.full((size,), self.count, dtype=torch.int32, device="cuda"))
            self.count += 1
        while len(self.blocks) > 40:
            block = self.blocks.pop(self.count * 7 % len(self.blocks))
            self.wrong += (block != block[0]).sum()

    def clear_of(self, *captured: torch.Tensor) -> None:
        for tensor in captured:
            start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.untyped_storage().nbytes()
            for block in self.blocks:
                low, high = block.data_ptr(), block.data_ptr() + block.untyped_storage().nbytes()
                assert high <= start or end <= low, (
                    "an eager block lies in a captured graph's output"
                )


def warmed_up(work: Any) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)


def training_step_as_a_graph(canaries: Canaries, rounds: int) -> Dict[str, Any]:
    data = [(torch.randn(64, 256), torch.randn(64, 16)) for _ in range(rounds)]
    eager, captured = model_of(1), model_of(1)
    optimizers = [
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9) for model in (eager, captured)
    ]
    x, y = torch.zeros(64, 256, device="cuda"), torch.zeros(64, 16, device="cuda")
    start = [parameter.detach().clone() for parameter in captured.parameters()]
    warmed_up(lambda: iteration(captured, optimizers[1], x, y))
    graph = torch.cuda.CUDAGraph()
    optimizers[1].zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = iteration(captured, optimizers[1], x, y)
    # The warm-up has trained: back to the beginning.
    with torch.no_grad():
        for parameter, first in zip(captured.parameters(), start):
            parameter.copy_(first)
        for state in optimizers[1].state.values():
            state["momentum_buffer"].zero_()
    pairs = []
    for left, right in data:
        x.copy_(left)
        y.copy_(right)
        canaries.stir()
        graph.replay()
        canaries.stir()
        canaries.clear_of(loss)
        pairs.append((loss.clone(), iteration(eager, optimizers[0], left.cuda(), right.cuda())))
    torch.cuda.synchronize()
    apart = max((abs(a.item() - b.item()) / max(abs(b.item()), 1e-6)) for a, b in pairs)
    return {"steps": rounds, "largest_difference": apart}


def graphed_callables(canaries: Canaries, rounds: int) -> float:
    """torch.cuda.make_graphed_callables: forward and backward of two modules, captured apart, in
    one pool."""
    plain, graphed = model_of(2), model_of(2)
    parts = graphed[:2], graphed[2:]
    samples = (
        (torch.randn(32, 256, device="cuda", requires_grad=True),),
        (torch.randn(32, 1024, device="cuda", requires_grad=True),),
    )
    first, second = torch.cuda.make_graphed_callables(parts, samples)
    apart = 0.0
    for index in range(rounds):
        x = (
            torch.randn(32, 256, generator=torch.Generator().manual_seed(index))
            .cuda()
            .requires_grad_()
        )
        canaries.stir()
        out = second(first(x))
        canaries.stir()
        out.square().mean().backward()
        z = x.detach().clone().requires_grad_()
        expected = plain(z)
        expected.square().mean().backward()
        apart = max(
            apart, (out - expected).abs().max().item(), (x.grad - z.grad).abs().max().item()
        )
        graphed.zero_grad(set_to_none=True)
        plain.zero_grad(set_to_none=True)
    return apart


def several_in_one_pool(canaries: Canaries) -> int:
    """Graphs that share a pool, replayed in the order of their captures; then released one by one,
    outputs first or last."""
    pool = torch.cuda.graph_pool_handle()
    x = torch.arange(MIB, dtype=torch.int32, device="cuda")
    graphs, outputs = [], []
    for number in range(4):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            scratch = [x + number for _ in range(4)]
            outputs.append(torch.stack(scratch).sum(0, dtype=torch.int32))
            del scratch
        graphs.append(graph)
    wrong = 0
    for _ in range(3):
        for graph in graphs:
            graph.replay()
        canaries.stir()
        canaries.clear_of(*outputs)
        for number, output in enumerate(outputs):
            wrong += int((output != 4 * (x + number)).sum().item())
    # Release before the frees: the graphs go, their outputs stay and keep their values among eager
    # work.
    kept = [output.clone() for output in outputs]
    graphs.clear()
    del graph
    for _ in range(10):
        canaries.stir()
        canaries.clear_of(*outputs)
    wrong += sum(int((output != value).sum().item()) for output, value in zip(outputs, kept))
    return wrong


def main(allocator: str, rounds: int = 40) -> Dict[str, Any]:
    machine.install(allocator)
    run = machine.kernels_run()
    canaries = Canaries()
    training = training_step_as_a_graph(canaries, rounds)
    apart = graphed_callables(canaries, max(rounds // 4, 3))
    wrong = several_in_one_pool(canaries)
    torch.cuda.synchronize()
    changed = canaries.wrong.item()
    if run:
        assert training["largest_difference"] < 1e-4, training
        assert apart < 1e-4, apart
        assert wrong == 0 and changed == 0, (wrong, changed)
    if allocator == "gruyere":
        machine.books_are_sound()
        canaries.blocks.clear()
        machine.clean()
        # A device-wide synchronisation later than the release: nothing is held for graphs any more.
        machine.clean()
        left = machine.gruyere_stats()
        assert left["captured"] == 0, (
            f"{left['captured']} bytes are still held for graphs that are gone"
        )
    return {
        **training,
        "graphed_callables_difference": apart,
        "wrong": wrong,
        "eager_blocks": canaries.count,
        "changed": changed,
    }


if __name__ == "__main__":
    machine.part(main)
