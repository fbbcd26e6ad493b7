"""(a) One seeded training: its losses to the last bit, and a digest of the weights that come of it.

acceptance.py runs it under torch's own allocator and under Gruyère, plain and under FSDP2; both
must say the same. Memory that is handed out while something still uses it shows up here as another
number."""

from __future__ import annotations

import hashlib
import os
from typing import Any, Dict

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch import nn

import machine


def shard(model: nn.Sequential) -> None:
    """Under FSDP2, as the first of two ranks whose other one has what it has: gathers and
    reductions on streams of their own."""
    from torch import distributed
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def gather(output: torch.Tensor, input: torch.Tensor, *_: Any, **__: Any) -> None:
        output.view(2, -1).copy_(input.expand(2, -1))

    def reduce_scatter(output: torch.Tensor, input: torch.Tensor, *_: Any, **__: Any) -> None:
        output.copy_(input.view(2, -1)[0])

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    # The fake group's own do nothing.
    distributed.all_gather_into_tensor = gather
    distributed.reduce_scatter_tensor = reduce_scatter
    for layer in model:
        fully_shard(layer)
    fully_shard(model)


def main(allocator: str, steps: int = 30, sharded: bool = False) -> Dict[str, Any]:
    if sharded:
        # As in a job of ranks, where the allocator adds no waits of its own.
        os.environ["WORLD_SIZE"] = "2"
    machine.install(allocator)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(1234)
    # The other attention kernels sum in an order that is not fixed.
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        layers = (
            nn.TransformerEncoderLayer(384, 6, 1536, dropout=0.1, batch_first=True)
            for _ in range(6)
        )
        model = nn.Sequential(nn.Embedding(2000, 384), *layers, nn.Linear(384, 2000)).cuda()
        if sharded:
            shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        copies = torch.cuda.Stream()
        losses = []
        for step in range(steps):
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(
                0, 2000, (8, 64 + 32 * (step * 7 % 9)), generator=generator
            ).pin_memory()
            # As a prefetching loader: copied on a stream of its own, used on another, dropped at
            # once.
            with torch.cuda.stream(copies):
                batch = tokens.cuda(non_blocking=True)
            torch.cuda.current_stream().wait_stream(copies)
            batch.record_stream(torch.cuda.current_stream())
            loss = nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())
            del batch
            loss.backward()
            if sharded:
                # The device falls behind its host, as under a larger model.
                torch.cuda._sleep(20_000_000)
            optimizer.step()
            # Once, when all is warm: later it would get back what it had.
            taken = model.parameters() if sharded and step == steps // 2 else ()
            sizes = [parameter.grad.nbytes for parameter in taken]
            optimizer.zero_grad(set_to_none=True)
            # The optimizer's kernels still read the gradients, which are free now. What the loader
            # gets it writes at once.
            with torch.cuda.stream(copies):
                got = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in 4 * sizes]
                for tensor in got:
                    tensor.fill_(0xFF)
            del got
            losses.append(loss.detach())
        values = [float(loss.item()).hex() for loss in losses]
    digest = hashlib.sha256()
    for parameter in model.parameters():
        weights = getattr(parameter, "_local_tensor", parameter).detach()
        digest.update(weights.cpu().numpy().tobytes())
    if allocator == "gruyere":
        torch.cuda.synchronize()
        machine.books_are_sound()
    return {"losses": values, "weights": digest.hexdigest(), "peaks": machine.peaks(allocator)}


if __name__ == "__main__":
    machine.part(main)
