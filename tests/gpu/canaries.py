"""(b) Canaries: every block is filled with a number of its own and checked by kernels before it
goes, while blocks are freed, reused and passed between streams and graphs.

Kernels that do nothing but last (torch.cuda._sleep) keep the device behind the host, so that a
block is always freed, and its memory asked for again, while kernels still use it. Eager threads
allocate, fill, pass on, check and drop, on torch's streams and on streams that they create
themselves, and destroy where that is asked for; meanwhile the main thread captures graphs, replays
them on any stream, and drops graphs whose replays are still running.

On a machine without kernels the books are judged: no block is handed out over a live one, nothing
is left, every invariant holds.
"""

from __future__ import annotations

import bisect
import contextlib
import gc
import random
import threading
import time
from dataclasses import dataclass, field
from typing import Any, ContextManager, Dict, List, Optional, Set, Tuple

import torch

import machine
from driver import Driver
from machine import MIB

ELEMENT = 4


class Overlaps:
    """Live blocks by address, of all threads: two may never share a byte."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.starts: List[int] = []
        self.ends: Dict[int, int] = {}
        self.found: List[str] = []

    def add(self, tensor: torch.Tensor) -> None:
        start = tensor.data_ptr()
        end = start + tensor.numel() * ELEMENT
        with self.lock:
            at = bisect.bisect_left(self.starts, start)
            if at < len(self.starts) and self.starts[at] < end:
                self.found.append(
                    f"[{start:#x}, {end:#x}) over a live block at {self.starts[at]:#x}"
                )
            if at and self.ends[self.starts[at - 1]] > start:
                self.found.append(
                    f"[{start:#x}, {end:#x}) inside a live block at {self.starts[at - 1]:#x}"
                )
            self.starts.insert(at, start)
            self.ends[start] = end

    def remove(self, tensor: torch.Tensor) -> None:
        with self.lock:
            start = tensor.data_ptr()
            del self.starts[bisect.bisect_left(self.starts, start)]
            del self.ends[start]


@dataclass
class Block:
    tensor: torch.Tensor
    pattern: int
    # Recorded after the last kernel that wrote it.
    written: torch.cuda.Event
    # Those that the allocator was told of.
    used_by: Set[int] = field(default_factory=set)


class Eager:
    """One thread's blocks and streams."""

    def __init__(
        self,
        seed: int,
        overlaps: Overlaps,
        driver: Driver,
        budget: int,
        destroys: bool = False,
        recording: Optional[ContextManager[Any]] = None,
    ) -> None:
        self.random = random.Random(seed)
        self.recording = recording or contextlib.nullcontext()
        self.overlaps = overlaps
        self.driver = driver
        self.budget = budget
        self.destroys = destroys
        self.streams = [torch.cuda.Stream() for _ in range(4)] + [torch.cuda.default_stream()]
        self.own: List[Tuple[int, torch.cuda.Stream]] = []
        self.blocks: List[Block] = []
        self.bytes = 0
        self.pattern = seed << 20
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        self.counts: Dict[str, int] = {}
        self.destroyed = 0

    def stream(self) -> torch.cuda.Stream:
        return self.random.choice(self.streams + [stream for _, stream in self.own])

    def linger(self) -> None:
        """Keeps the current stream busy for up to a millisecond, half of the time: longer than the
        host needs for a move, so that the device falls behind."""
        if self.random.random() < 0.5:
            torch.cuda._sleep(self.random.choice((50_000, 500_000, 2_000_000)))

    def size(self) -> int:
        """Elements: any size from 512 B to 32 MiB, small ones most."""
        bits = self.random.choice((7, 9, 10, 12, 13, 15, 18, 20, 21, 22))
        return (1 << bits) + self.random.randrange(1 << bits)

    def allocate(self) -> None:
        count = self.size()
        if self.bytes + count * ELEMENT > self.budget:
            return
        stream = self.stream()
        self.pattern += 1
        with torch.cuda.stream(stream):
            tensor = torch.empty(count, dtype=torch.int32, device="cuda")
            self.overlaps.add(tensor)
            self.linger()
            tensor.fill_(self.pattern)
            written = torch.cuda.Event()
            written.record()
        self.bytes += count * ELEMENT
        self.blocks.append(Block(tensor, self.pattern, written))

    def take(self) -> Optional[Block]:
        if not self.blocks:
            return None
        block = self.blocks.pop(self.random.randrange(len(self.blocks)))
        self.bytes -= block.tensor.numel() * ELEMENT
        return block

    def check(self, block: Block, stream: torch.cuda.Stream) -> None:
        """Enqueues the check on `stream`, behind the last write; says so to the allocator."""
        with torch.cuda.stream(stream):
            stream.wait_event(block.written)
            self.linger()
            found = (block.tensor != block.pattern).sum()
            # One counter, on one stream: additions of several would race.
            self.streams[0].wait_stream(stream)
        with torch.cuda.stream(self.streams[0]):
            self.wrong += found
        with self.recording:
            found.record_stream(self.streams[0])
            block.tensor.record_stream(stream)
        block.used_by.add(stream.cuda_stream)

    def drop(self) -> None:
        """Checked on any stream, and dropped before the check has run; half of the time under
        another current stream."""
        block = self.take()
        if block is None:
            return
        self.check(block, self.stream())
        self.overlaps.remove(block.tensor)
        with torch.cuda.stream(self.stream()):
            block.tensor = None  # type: ignore[assignment]

    def hand_over(self) -> None:
        """Another stream checks the block and writes a new number."""
        if not self.blocks:
            return
        block = self.random.choice(self.blocks)
        stream = self.stream()
        self.check(block, stream)
        self.pattern += 1
        block.pattern = self.pattern
        with torch.cuda.stream(stream):
            self.linger()
            block.tensor.fill_(block.pattern)
            block.written = torch.cuda.Event()
            block.written.record()

    def create_stream(self) -> None:
        if len(self.own) < 4:
            handle = self.driver.stream()
            self.own.append((handle, torch.cuda.ExternalStream(handle)))

    def destroy_stream(self) -> None:
        """With its work under way and live blocks that were allocated on it. Blocks that it was
        recorded for go first: to free them later would use the stream (torch's own rule)."""
        if not self.own:
            return
        handle, stream = self.own.pop(self.random.randrange(len(self.own)))
        kept = [block for block in self.blocks if handle not in block.used_by]
        self.blocks = [block for block in self.blocks if handle in block.used_by]
        while self.blocks:
            self.drop_quietly()
        self.blocks = kept
        self.driver.cuStreamDestroy_v2(handle)
        self.destroyed += 1

    def drop_quietly(self) -> None:
        block = self.take()
        assert block is not None
        self.check(block, self.streams[0])
        self.overlaps.remove(block.tensor)
        block.tensor = None  # type: ignore[assignment]

    def run(self, until: float) -> None:
        moves = [
            (self.allocate, 10),
            (self.drop, 8),
            (self.hand_over, 3),
            (self.create_stream, 0.2),
        ]
        if self.destroys:
            moves.append((self.destroy_stream, 0.05))
        functions, weights = [move for move, _ in moves], [weight for _, weight in moves]
        while time.monotonic() < until:
            for move in self.random.choices(functions, weights, k=50):
                move()
                self.counts[move.__name__] = self.counts.get(move.__name__, 0) + 1
            # The device may be behind, but not by minutes.
            self.streams[self.random.randrange(4)].synchronize()
            if self.overlaps.found:
                return

    def end(self) -> int:
        while self.blocks:
            self.drop_quietly()
        torch.cuda.synchronize()
        if self.destroys:
            for handle, _ in self.own:
                self.driver.cuStreamDestroy_v2(handle)
            self.own.clear()
        return int(self.wrong.item())


@dataclass
class Captured:
    graph: torch.cuda.CUDAGraph
    seed: torch.Tensor
    output: torch.Tensor
    shared: bool


class Graphs:
    """Captures, replays and releases, on the main thread."""

    def __init__(self, seed: int, recording: ContextManager[Any]) -> None:
        self.random = random.Random(seed)
        self.recording = recording
        self.streams = [torch.cuda.Stream() for _ in range(3)]
        self.live: List[Captured] = []
        # Outputs that outlive their graph, and the number that each must keep.
        self.orphans: List[Tuple[torch.Tensor, int]] = []
        self.pool = torch.cuda.graph_pool_handle()
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        self.counter = torch.cuda.Stream()
        self.last = torch.cuda.Event()
        self.last.record()
        self.counts = {
            "captures": 0,
            "replays": 0,
            "released_in_flight": 0,
            "released_before_the_free": 0,
        }

    def capture(self) -> None:
        count = 1 << self.random.choice((12, 16, 20))
        seed = torch.zeros(1, dtype=torch.int32, device="cuda")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        shared = self.random.random() < 0.5
        if shared and not any(captured.shared for captured in self.live):
            # A pool whose graphs are all gone is gone too.
            self.pool = torch.cuda.graph_pool_handle()
        with self.recording, torch.cuda.graph(
            graph, pool=self.pool if shared else None, capture_error_mode="thread_local"
        ):
            # Written early, slept over, read late: whoever else gets this memory is seen, or sees
            # us.
            scratch = [seed.expand(count) + number for number in range(4)]
            torch.cuda._sleep(100_000)
            output = torch.stack(scratch).sum(0, dtype=torch.int32)
            del scratch
        self.live.append(Captured(graph, seed, output, shared))
        self.counts["captures"] += 1

    def replay(self, captured: Captured) -> int:
        """On any stream, behind the replay before it: those of graphs that share a pool must not
        overlap (torch's rule)."""
        stream = self.random.choice(self.streams)
        self.counts["replays"] += 1
        number = self.counts["replays"]
        with torch.cuda.stream(stream):
            stream.wait_event(self.last)
            captured.seed.fill_(number)
            captured.graph.replay()
            found = (captured.output != 4 * number + 6).sum()
            self.last = torch.cuda.Event()
            self.last.record()
            self.counter.wait_stream(stream)
        with torch.cuda.stream(self.counter):
            self.wrong += found
        found.record_stream(self.counter)
        captured.seed.record_stream(stream)
        return number

    def release(self) -> None:
        """The graph goes while its replay runs. Sometimes its output stays, and must keep what the
        replay wrote: that of a graph with a pool of its own. In a shared pool, graphs that were
        captured before may write to it again (torch's rule, under every allocator)."""
        captured = self.live.pop(self.random.randrange(len(self.live)))
        number = self.replay(captured)
        if not captured.shared and self.random.random() < 0.6:
            self.orphans.append((captured.output, 4 * number + 6))
            self.counts["released_before_the_free"] += 1
        else:
            self.counts["released_in_flight"] += 1
        del captured
        if len(self.orphans) > 3:
            self.settle_orphan()

    def settle_orphan(self) -> None:
        tensor, value = self.orphans.pop(0)
        torch.cuda.current_stream().wait_event(self.last)
        found = (tensor != value).sum()
        self.counter.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.counter):
            self.wrong += found
        found.record_stream(self.counter)
        # Nothing that ran on another stream than the one it came from may be left when it is freed.
        torch.cuda.synchronize()

    def run(self, until: float) -> None:
        while time.monotonic() < until:
            self.capture()
            for _ in range(6):
                self.replay(self.random.choice(self.live))
            while len(self.live) > 4 or self.random.random() < 0.3 and self.live:
                self.release()

    def end(self) -> int:
        while self.orphans:
            self.settle_orphan()
        self.live.clear()
        torch.cuda.synchronize()
        return int(self.wrong.item())


def detector_sees_one_wrong_element(overlaps: Overlaps, driver: Driver) -> bool:
    """The check itself, on a block with a fault planted in its last element."""
    eager = Eager(99, overlaps, driver, 64 * MIB)
    eager.allocate()
    eager.blocks[0].written.synchronize()
    eager.blocks[0].tensor[-1] = -1
    torch.cuda.synchronize()
    return eager.end() == 1


def what_is_left(stats: Dict[str, int]) -> str:
    """Whose memory is left: tensors that Python still reaches, and live blocks."""
    tensors = [
        it for it in gc.get_objects() if isinstance(it, torch.Tensor) and it.is_cuda
    ]
    blocks = [
        (block["size"], block["state"], segment["stream"], segment.get("segment_pool_id"))
        for segment in torch.cuda.memory_snapshot()
        for block in segment["blocks"]
        if block["state"] != "inactive"
    ]
    blocks.sort(key=str)
    holders: Dict[str, int] = {}
    for index in range(len(tensors)):
        for holder in gc.get_referrers(tensors[index]):
            if holder is not tensors:
                holders[named(holder)] = holders.get(named(holder), 0) + 1
    return (
        f"{stats}; {len(tensors)} tensors are still reached, of "
        f"{sum(it.nbytes for it in tensors)} bytes, held by {holders or 'C++ alone'}; "
        f"{len(blocks)} blocks: {blocks[:20]}"
    )


def named(holder: Any) -> str:
    """An object that holds a tensor, in words."""
    code = getattr(holder, "f_code", None)
    return f"a frame of {code.co_name}" if code else type(holder).__name__


def main(
    allocator: str,
    seconds: float = 30.0,
    threads: int = 2,
    seed: int = 1,
    destroy_streams: bool = False,
    record_stream: bool = True,
) -> Dict[str, Any]:
    machine.install(allocator, record_stream)
    run = machine.kernels_run()
    driver = Driver()
    overlaps = Overlaps()
    budget = min(torch.cuda.mem_get_info()[0] // 4, 4 << 30) // threads
    seen = detector_sees_one_wrong_element(overlaps, driver)
    # Torch 2.11's own allocator (2.15's no more) forgets a record_stream() that one thread makes
    # while another captures (benches/results/2026-11-29-h200.md). Gruyère does not: there the two
    # run side by side.
    recording = contextlib.nullcontext() if allocator == "gruyere" else threading.Lock()
    eagers = [
        Eager(seed + index, overlaps, driver, budget, destroy_streams, recording)
        for index in range(threads)
    ]
    graphs = Graphs(seed, recording)
    # The counters are written on the default stream, and added to on others.
    torch.cuda.synchronize()
    failures: List[BaseException] = []
    until = time.monotonic() + seconds

    def guarded(eager: Eager) -> None:
        try:
            eager.run(until)
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=guarded, args=(eager,)) for eager in eagers]
    for worker in workers:
        worker.start()
    if record_stream:
        graphs.run(until)
    for worker in workers:
        worker.join()
    if failures:
        raise failures[0]
    torch.cuda.synchronize()
    wrong_eager, wrong_graphs = sum(eager.end() for eager in eagers), graphs.end()
    wrong = wrong_eager + wrong_graphs
    counts = dict(graphs.counts)
    for eager in eagers:
        for name, count in ({**eager.counts, "streams_destroyed": eager.destroyed}).items():
            counts[name] = counts.get(name, 0) + count
    assert not overlaps.found, overlaps.found[:5]
    if record_stream:
        differ = "were not what had been written" if allocator == "gruyere" else "differ"
        assert not run or wrong == 0, (
            f"{wrong} elements {differ}: {wrong_eager} of eager blocks, {wrong_graphs} of graphs"
        )
        assert not run or seen, "the check did not see the fault that was planted"
    eagers.clear()
    workers.clear()
    del eager, graphs
    if allocator == "gruyere" and record_stream:
        machine.clean()
        machine.clean()
        machine.books_are_sound()
        left = machine.gruyere_stats()
        assert left["live"] == 0 and left["pending"] == 0 and left["captured"] == 0, what_is_left(
            left
        )
    return {
        "wrong": wrong if run else None,
        "detector": seen if run else None,
        "moves": counts,
        "seconds": seconds,
    }


if __name__ == "__main__":
    machine.part(main)
