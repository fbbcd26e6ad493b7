"""(d) Out of memory at a capped size: torch's own exception, and the program goes on, in this
thread and in others."""

from __future__ import annotations

import threading
from typing import Any, Dict, List

import torch
from torch import nn

import machine
from machine import GIB, MIB


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: int) -> float:
    x = torch.ones(batch, 128, 512, device="cuda")
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


def main(allocator: str, allowed: int = GIB) -> Dict[str, Any]:
    machine.install(allocator)
    run = machine.kernels_run()
    machine.clean()
    machine.cap(allowed)
    # Fill, catch, go on with what was freed.
    kept: List[torch.Tensor] = []
    message = ""
    try:
        while len(kept) * 32 * MIB < 4 * allowed:
            kept.append(torch.full((8 * MIB,), float(len(kept)), device="cuda"))
    # torch.OutOfMemoryError is this class too, from 2.5 on.
    except torch.cuda.OutOfMemoryError as error:
        message = str(error)
        assert len(error.args) == 1
    assert message.startswith("CUDA out of memory. Tried to allocate 32.00 MiB."), (
        message or "nothing ran out of memory"
    )
    assert len(kept) * 32 * MIB <= allowed, "more was handed out than is allowed"
    filled = len(kept) * 32 * MIB / allowed
    del kept[::2]
    larger = torch.full((12 * MIB,), -1.0, device="cuda")
    if run:
        assert all((block == 2 * index + 1).all().item() for index, block in enumerate(kept)), (
            "a block changed"
        )
        assert (larger == -1).all().item()
    del larger
    kept.clear()

    # The loop that people write.
    torch.manual_seed(0)
    layers = (
        nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True) for _ in range(3)
    )
    model = nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch, tried = 2048, []
    while batch:
        tried.append(batch)
        try:
            losses = [train(model, optimizer, batch) for _ in range(3)]
            break
        except torch.cuda.OutOfMemoryError:
            optimizer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
            batch //= 2
    assert batch and len(tried) > 1, tried
    losses += [train(model, optimizer, batch) for _ in range(6)]
    assert not run or losses[-1] < losses[0], losses

    # Several threads run out at once; each catches its own and finishes.
    caught: List[int] = []

    def greedy() -> None:
        mine = []
        try:
            for _ in range(400):
                mine.append(torch.empty(16 * MIB, dtype=torch.uint8, device="cuda"))
        except torch.cuda.OutOfMemoryError:
            caught.append(len(mine))

    threads = [threading.Thread(target=greedy) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert caught, "no thread ran out of memory"
    last = train(model, optimizer, batch)
    assert not run or last < losses[0]
    del model, optimizer
    machine.clean()
    if allocator == "gruyere":
        machine.books_are_sound()
        assert machine.gruyere_stats()["live"] == 0
        assert machine.gruyere_stats()["reserved_peak"] <= allowed
    return {
        "filled": filled,
        "batch": batch,
        "tried": tried,
        "threads_out_of_memory": len(caught),
        "message": message,
    }


if __name__ == "__main__":
    machine.part(main)
