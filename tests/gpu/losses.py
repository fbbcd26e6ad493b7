"""(a) One seeded training: its losses to the last bit, and a digest of the weights that come of it.

acceptance.py runs it under torch's own allocator and under Gruyère; both must say the same. Memory
that is handed out while something still uses it shows up here as another number."""

from __future__ import annotations

import hashlib
import os
from typing import Any, Dict

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch import nn

import machine


def main(allocator: str, steps: int = 30) -> Dict[str, Any]:
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
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach())
        values = [float(loss.item()).hex() for loss in losses]
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    if allocator == "gruyere":
        torch.cuda.synchronize()
        machine.books_are_sound()
    return {"losses": values, "weights": digest.hexdigest(), "peaks": machine.peaks(allocator)}


if __name__ == "__main__":
    machine.part(main)
