"""Measurement in the process of a run: limits the device's memory, checks the allocator, and reads
the figures."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Callable, Optional

# Reasons of a row without figures that no value of the stand-in's explains.
_CHILD = "give the script that a child runs (of a notebook: `jupyter nbconvert --to script`)"
NO_TORCH = "it did not import torch"
NO_CUDA = f"the program used no CUDA memory in its own process: {_CHILD}"
GONE = f"its process became another program (as `jupyter NAME` does) or called os._exit(): {_CHILD}"
UNUSED = (NO_TORCH, NO_CUDA, GONE)
COMPLETED, OUT_OF_MEMORY, FAILED, FAULTS = "completed", "out of memory", "failed", "faults"


@dataclass
class Result:
    """The results of one run. Memory is that of device 0, in bytes."""

    outcome: str
    reason: str = ""
    """Why the run did not complete, in one line."""
    steps: int = 0
    """The number of finished steps."""
    allocated_peak: int = 0
    """Peak of live bytes, as the allocator counts them (torch's default also counts remainders that
    it does not split off)."""
    requested_peak: int = 0
    """Peak of requested bytes; 0 if the allocator does not count them. A block that other streams
    use counts until their work is seen to be done, which each allocator asks at its own time."""
    requested_total: int = 0
    """All bytes requested in the run; 0 if the allocator does not count them."""
    reserved_peak: int = 0
    """Peak of the memory that the allocator reports as held."""
    physical_peak: int = 0
    """Peak of physical memory: from the stand-in's books; on a GPU `reserved_peak`."""
    beside_peak: int = 0
    """On a GPU: the most by which the device's memory in use had grown, at the end of a step,
    beyond what the allocator held: kernels and handles of libraries, or another process. On the
    stand-in: the least that other libraries of the process held at some time."""
    retries: int = 0
    """Number of requests for which the allocator had to release memory."""
    caught: int = 0
    """Number of requests that failed; if the program completed, it caught these errors."""
    host_ns: list[int] = field(default_factory=list)
    """Host time of each step."""
    step_ns: list[int] = field(default_factory=list)
    """Time of each step on the device; empty on the stand-in."""
    parts: dict[str, int] = field(default_factory=dict)
    """For Gruyère, if requested: the memory held beyond live memory at the peak (`parts`)."""
    left_out: list[str] = field(default_factory=list)
    """The program's own choices of an allocator, which were ignored."""
    restores: int = 0
    """How often torch restored the state of a CUDA graphs' pool."""
    requested: list[int] = field(default_factory=list)
    """If there were restores: the bytes requested in each step and after the last one, without
    those of the restores, parted at each restore, too."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class Unfit(Exception):
    """This run cannot be measured as requested; the message says why."""


def stand_in() -> Optional[ctypes.CDLL]:
    """The stand-in GPU if it is preloaded, else None."""
    process = ctypes.CDLL(None)
    if not hasattr(process, "phantom_physical"):
        return None
    for name in ("phantom_physical", "phantom_physical_peak", "phantom_misuses"):
        getattr(process, name).restype = ctypes.c_uint64
    return process


class Meter:
    """Measures one run, from before CUDA is used to its end."""

    def __init__(self, allocator: str, memory: Optional[int]) -> None:
        """`memory`: the bytes that the device appears to have; None: all. Create it before CUDA is
        initialised, before or after torch is imported."""
        self.allocator = allocator
        self.memory = memory
        self.stand_in = stand_in()
        # Bytes in use on a real device before the program.
        self.others: Optional[int] = None
        self.beside_peak = 0
        # torch's peaks before the program reset them.
        self.peaks: dict[str, int] = {}
        # The same for its counts of events.
        self.counts: dict[str, int] = {}
        # The bytes requested until the program last reset the counts, less those of restores.
        self.requested = 0
        # That total at each step's end and each restore.
        self.totals = [0]
        self.restores = 0
        if memory is not None and self.stand_in is not None:
            os.environ["PHANTOM_MEMORY"] = str(memory)

    def prepare(self, torch: Any) -> None:
        """Call once torch is imported. Uses no CUDA."""
        if self.stand_in is None:
            torch.cuda._lazy_call(lambda: self._begin_on_gpu(torch))
        # Only then is every function in place: Gruyère may replace torch's until CUDA starts.
        torch.cuda._lazy_call(lambda: self._watch_resets(torch))

    def _watch_resets(self, torch: Any) -> None:
        """Have the figures cover the whole run, even if the program resets them at each step. All
        of torch's functions that do so end in these, which a program may also call itself."""
        self._watch_restores(torch)
        for name, note in (
            ("_cuda_resetPeakMemoryStats", self._note_peaks),
            ("_accelerator_resetPeakStats", self._note_peaks),
            ("_cuda_resetAccumulatedMemoryStats", self._note_counts),
            ("_accelerator_resetAccumulatedStats", self._note_counts),
        ):
            reset = getattr(torch._C, name, None)
            if reset is not None:
                setattr(torch._C, name, _after(note, torch, reset))

    def _watch_restores(self, torch: Any) -> None:
        """Leave out of the requests what a restore of a graphs' pool makes: torch's own allocator
        frees and allocates whole segments there, Gruyère changes only what differs."""
        restore = getattr(torch._C, "_cuda_setCheckpointPoolState", None)
        if restore is None:
            return

        @functools.wraps(restore)
        def restoring(device: int, *arguments: Any) -> Any:
            if device != 0:
                return restore(device, *arguments)
            self._note_requested(torch)
            self.restores += 1
            try:
                return restore(device, *arguments)
            finally:
                self.requested += self.totals[-1] - self._requested(torch)

        torch._C._cuda_setCheckpointPoolState = restoring

    def _requested(self, torch: Any) -> int:
        """All bytes requested so far, without those of restores."""
        statistics = torch._C._cuda_memoryStats(0)
        return self.requested + int(statistics["requested_bytes"]["all"]["allocated"])

    def _note_requested(self, torch: Any) -> None:
        self.totals.append(self._requested(torch))

    def _note_peaks(self, torch: Any) -> None:
        statistics = torch.cuda.memory_stats(0)
        for name in ("allocated_bytes", "reserved_bytes", "requested_bytes"):
            peak = statistics.get(f"{name}.all.peak", 0)
            self.peaks[name] = max(peak, self.peaks.get(name, 0))

    def _note_counts(self, torch: Any) -> None:
        statistics = torch.cuda.memory_stats(0)
        for name in ("num_alloc_retries", "num_ooms"):
            self.counts[name] = self.counts.get(name, 0) + statistics.get(name, 0)
        self.requested += statistics.get("requested_bytes.all.allocated", 0)

    def refused(self, torch: Any) -> int:
        """The number of requests that failed so far."""
        statistics = torch.cuda.memory_stats(0) if torch.cuda.is_initialized() else {}
        return self.counts.get("num_ooms", 0) + int(statistics.get("num_ooms", 0))

    def _begin_on_gpu(self, torch: Any) -> None:
        free, total = torch.cuda.mem_get_info(0)
        self.others = total - free
        if self.memory is not None:
            torch.cuda.set_per_process_memory_fraction(min(1.0, self.memory / total), 0)

    def sample(self, torch: Any) -> None:
        """Call at the end of a step. Records what it requested, and the memory in use on a real
        device beside the allocator's."""
        if torch.cuda.is_initialized():
            self._note_requested(torch)
        if self.stand_in is None and torch.cuda.is_initialized():
            free, total = torch.cuda.mem_get_info(0)
            grown = total - free - (self.others or 0)
            self.beside_peak = max(self.beside_peak, grown - torch.cuda.memory_reserved(0))

    def read(self, torch: Any, result: Result) -> None:
        """Fill in the figures. Raises Unfit if the run is not valid."""
        if not torch.cuda.is_initialized():
            raise Unfit(NO_CUDA)
        self._check_allocator(torch)
        self._note_peaks(torch)
        result.allocated_peak = self.peaks["allocated_bytes"]
        result.reserved_peak = self.peaks["reserved_bytes"]
        result.requested_peak = self.peaks["requested_bytes"]
        result.requested_total = self._requested(torch)
        if self.restores:
            self._note_requested(torch)
            result.restores = self.restores
            result.requested = [
                total - before for before, total in zip(self.totals, self.totals[1:])
            ]
        self._note_counts(torch)
        result.retries = self.counts["num_alloc_retries"]
        result.caught = self.counts["num_ooms"]
        if self.stand_in is not None:
            result.physical_peak = self.stand_in.phantom_physical_peak(0)
            result.beside_peak = max(0, result.physical_peak - result.reserved_peak)
        else:
            self.sample(torch)
            result.physical_peak = result.reserved_peak
            result.beside_peak = self.beside_peak
        faults = self._faults(torch)
        if faults:
            result.outcome, result.reason = FAULTS, faults[0]

    def _check_allocator(self, torch: Any) -> None:
        """Raise Unfit if the run did not use the allocator that its row names: torch silently
        ignores settings that it does not know."""
        if self.allocator == "gruyere":
            import gruyere

            if not gruyere.is_enabled():
                raise Unfit(f"Gruyère was not enabled: {gruyere.disable_reason()}")
            return
        backend = torch.cuda.get_allocator_backend()
        wanted = "cudaMallocAsync" if self.allocator == "async" else "native"
        if backend != wanted:
            raise Unfit(f"torch {torch.__version__} used the backend {backend}, not {wanted}")
        if self.allocator in ("default", "expandable"):
            segments = torch.cuda.memory_snapshot()
            expandable = [bool(segment.get("is_expandable")) for segment in segments]
            if any(expandable) != (self.allocator == "expandable") and segments:
                raise Unfit(
                    f"torch {torch.__version__} had "
                    f"{'' if any(expandable) else 'no '}expandable segments"
                )

    def _faults(self, torch: Any) -> list[str]:
        """The faults found by the driver's books and by the library's own check."""
        found = []
        if self.stand_in is not None and self.stand_in.phantom_misuses():
            with tempfile.TemporaryDirectory(prefix="gruyere-bench-") as folder:
                books = os.path.join(folder, "books")
                self.stand_in.phantom_write_books(books.encode())
                with open(books) as file:
                    found += [
                        f"the driver's rules were broken: {misuse}"
                        for misuse in json.load(file)["misuse"]
                    ]
        if self.allocator == "gruyere":
            import gruyere
            from gruyere._native import library

            torch.cuda.synchronize(0)
            if library.load().gruyere_validate() != 0:
                found.append("gruyere_validate found a broken invariant; the log says which")
            if gruyere.stats().bad_frees:
                found.append(f"{gruyere.stats().bad_frees} frees of addresses without a live block")
        return found


def _after(note: Callable[[Any], None], torch: Any, reset: Callable[[int], Any]) -> Any:
    """`reset`, after `note` of the figures that it resets."""

    @functools.wraps(reset)
    def noting(device: int) -> Any:
        # The figures are those of device 0.
        if device == 0:
            note(torch)
        return reset(device)

    return noting


def is_out_of_memory(torch: Any, error: BaseException) -> bool:
    """Whether `error`, or an exception that caused it, is torch's out-of-memory error."""
    return any(
        isinstance(cause, torch.cuda.OutOfMemoryError)
        or (isinstance(cause, RuntimeError) and "CUDA out of memory." in str(cause))
        for cause in causes(error)
    )


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error and the chain of exceptions that caused it."""
    seen = set()
    cause: Optional[BaseException] = error
    while cause is not None and id(cause) not in seen:
        yield cause
        seen.add(id(cause))
        cause = cause.__cause__ or cause.__context__


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
