"""(e) Three programs under one allocator: what they hold, the smallest size that they fit in, how
long a step takes.

    pretrain   a decoder of fixed shape, AdamW, gradients accumulated over two batches
    varied     the same with a new length and batch at every step, then again with little more
               memory than it needs
    generate   serving: sequences come, grow piece by piece, and go

hold: peak reserved / peak live. fit: the smallest allowed size at which the program completes /
peak live (a search between peak live and peak reserved, `tries` steps deep). 1 is the limit of
both.
"""

from __future__ import annotations

import random
import time
from typing import Any, Dict, Iterator, List, Optional, Tuple

import torch
from torch import nn
from torch.nn import functional as F

import machine

WIDTH, HEADS, LAYERS, VOCABULARY = 768, 12, 8, 16384


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(
        self, x: torch.Tensor, past: Optional[Tuple[torch.Tensor, torch.Tensor]] = None
    ) -> Any:
        batch, length, _ = x.shape
        parts = (
            self.qkv(self.norm1(x))
            .view(batch, length, 3, HEADS, WIDTH // HEADS)
            .permute(2, 0, 3, 1, 4)
        )
        q, k, v = parts.unbind(0)
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=length > 1)
            .transpose(1, 2)
            .reshape(batch, length, WIDTH)
        )
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return x if past is None else (x, (k, v))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


def train(shapes: List[Tuple[int, int]], accumulate: int) -> Iterator[int]:
    """One step of AdamW after every `accumulate` batches of the given (batch, length); yields the
    tokens of each step."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for start in range(0, len(shapes), accumulate):
        done = 0
        for batch, length in shapes[start : start + accumulate]:
            tokens = torch.zeros(batch, length, dtype=torch.long, device="cuda")
            with torch.autocast("cuda", torch.bfloat16):
                loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            (loss / accumulate).backward()
            done += batch * length
            del tokens, loss
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield done


def pretrain() -> Iterator[int]:
    return train([(4, 1024)] * 24, 2)


def varied() -> Iterator[int]:
    lengths = random.Random(7)
    return train([(lengths.randint(2, 8), lengths.randrange(100, 1500)) for _ in range(24)], 1)


@torch.no_grad()
def generate() -> Iterator[int]:
    """Up to 24 sequences at a time; each starts with a prompt and grows by a chunk a round until it
    is done."""
    rounds = random.Random(11)
    with torch.device("cuda"):
        model = Decoder().to(torch.bfloat16)
    sequences: List[Tuple[int, List[Tuple[torch.Tensor, torch.Tensor]]]] = []
    for _ in range(40):
        done = 0
        while len(sequences) < 24:
            length = rounds.randrange(64, 1024)
            empty = torch.zeros(1, HEADS, 0, WIDTH // HEADS, dtype=torch.bfloat16, device="cuda")
            sequences.append((length + 32 * rounds.randrange(2, 30), [(empty, empty)] * LAYERS))
            done += advance(model, sequences, len(sequences) - 1, length)
        for index in range(len(sequences)):
            done += advance(model, sequences, index, 32)
        sequences = [
            (wanted, caches) for wanted, caches in sequences if caches[0][0].shape[2] < wanted
        ]
        yield done


def advance(model: Decoder, sequences: List[Any], index: int, count: int) -> int:
    wanted, caches = sequences[index]
    x = model.embedding(torch.zeros(1, count, dtype=torch.long, device="cuda"))
    new = []
    for layer, cache in zip(model.layers, caches):
        x, cache = layer(x, cache)
        new.append(cache)
    model.head(x[:, -1])
    sequences[index] = (wanted, new)
    return count


PROGRAMS = {"pretrain": pretrain, "varied": varied, "generate": generate}


def attempt(name: str, allowed: Optional[int]) -> Dict[str, Any]:
    """Runs the program once, from nothing, allowed to hold that many bytes: how far it came, and
    how fast it was."""
    machine.clean()
    machine.cap(allowed)
    times: List[float] = []
    tokens = used = 0
    completed = True
    program = PROGRAMS[name]()
    try:
        while True:
            start = time.perf_counter()
            try:
                tokens_of_step = next(program)
            except StopIteration:
                break
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
            tokens += tokens_of_step
            used = max(used, machine.device_used())
    except torch.cuda.OutOfMemoryError:
        completed = False
    del program
    machine.clean()
    machine.cap(None)
    # The first steps take memory, load kernels and pick algorithms.
    settled = times[3:] or times
    return {
        "completed": completed,
        "steps": len(times),
        "step_ms": 1e3 * sum(settled) / max(len(settled), 1),
        "tokens_per_s": tokens / sum(times) if times else 0.0,
        "device_used": used,
    }


def main(
    allocator: str,
    program: str,
    tries: int = 6,
    seconds: float = 40.0,
    live: Optional[int] = None,
    near: float = 1.06,
) -> Dict[str, Any]:
    """`live`: the program's peak of live bytes, where another run has measured it (the same for
    every allocator)."""
    machine.install(allocator)
    machine.kernels_run()
    machine.clean()
    before = machine.device_used()
    deadline = time.monotonic() + seconds
    free = attempt(program, None)
    assert free["completed"], "the device is too small for this program"
    peaks = machine.peaks(allocator)
    live = live or peaks["live"]
    result = {
        "program": program,
        **free,
        "live": live,
        "reserved": peaks["reserved"],
        "device_used": free["device_used"] - before,
        "hold": peaks["reserved"] / live,
    }
    if allocator == "async":
        # What torch allows there counts live bytes, not held ones: it is no bound on memory.
        return {**result, "near_limit": None, "fit": None, "fit_at_least": None, "retries": None}
    if program == "varied":
        # Little more than what is live at the peak: the allocator must give memory back, or put it
        # together, at every step.
        result["near_limit"] = {"allowed": near, **attempt(program, int(near * live))}
    below, above = live, peaks["reserved"]
    for _ in range(tries):
        if above - below < live // 500 or time.monotonic() > deadline:
            break
        middle = (below + above) // 2
        if attempt(program, middle)["completed"]:
            above = middle
        else:
            below = middle
    result["fit"] = above / live
    result["fit_at_least"] = below / live
    if allocator == "gruyere":
        machine.books_are_sound()
        result["retries"] = machine.gruyere_stats()["retries"]
    else:
        result["retries"] = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    return result


if __name__ == "__main__":
    machine.part(main)
