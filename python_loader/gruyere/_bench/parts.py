"""The parts of the memory that Gruyère holds beyond live memory at the peak, from the heap's own
statistics: they explain why it holds more than another allocator."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass
from typing import Any, Optional

# The interval between two samples of the thread (seconds), and the pause after each sample as a
# multiple of its duration.
EVERY, REST = 0.001, 0.5
# A sample represents the peak if it saw at least these shares of the live and held peaks.
OF_LIVE, OF_HELD = 0.95, 0.98
# A part is the reason if it is at least this share of the difference.
OF_DIFFERENCE = 0.5


@dataclass(frozen=True)
class Reason:
    """Why Gruyère holds more."""

    says: str
    """The text after "Gruyère holds ... more:"; {} is the part's bytes."""
    remedy: str
    """What to set, or that no setting helps."""


REASONS = {
    "start": Reason(
        "its first growth took {} more than was needed",
        "The amount is the same for every program, and small for larger ones.",
    ),
    "small": Reason("{} lay free in slabs of small blocks", "No setting changes that."),
    "pieces": Reason(
        "{} lay free between live blocks, in pieces of less than a page", "No setting changes that."
    ),
    "streams": Reason(
        "{} was freed and waited for other streams",
        "GRUYERE_CONF=waits:budget lets streams wait for each other, and may hold less.",
    ),
    "graphs": Reason(
        "{} lay free in the memory of CUDA graphs",
        "Graphs that are not replayed at once can share a pool: torch.cuda.graph(pool=...).",
    ),
    "idle": Reason(
        "{} was idle pages, which it takes ahead of need",
        "GRUYERE_CONF=slack:0.1% takes fewer of them, and moves pages more often.",
    ),
}


def of(stats: Any, first: int) -> dict[str, int]:
    """The parts of the memory that is held but not live. `first`: the memory held at the first
    sample."""
    free = max(0, stats.reserved - stats.live - stats.pending)
    idle = min(stats.idle, stats.arena_free)
    # The rest belongs to CUDA graphs, if there are any.
    rest = max(0, free - stats.slab_free - stats.arena_free)
    return {
        "start": idle if stats.reserved_peak <= first else 0,
        "small": stats.slab_free,
        "pieces": stats.arena_free - idle,
        "streams": stats.pending,
        "graphs": min(stats.captured, rest),
        "idle": idle if stats.reserved_peak > first else 0,
    }


class Sampler:
    """Samples the heap while a program runs, and keeps the sample with the most live memory. It
    samples whenever the program returns from a C call, as those of torch are, and on a thread of
    its own, to cover backward passes. So the run's times are not those of the program."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.first = 0
        self.best: Optional[Any] = None
        self.is_over = threading.Event()
        self.next = 0.0
        self.thread = threading.Thread(target=self._watch, name="gruyere-parts", daemon=True)

    def start(self) -> None:
        """Start sampling once CUDA is in use."""
        self.torch.cuda._lazy_call(self._begin)

    def _begin(self) -> None:
        self.thread.start()
        # A profiler of the program takes precedence.
        if sys.getprofile() is None:
            threading.setprofile(self._returned)
            sys.setprofile(self._returned)

    def _watch(self) -> None:
        while not self.is_over.wait(EVERY):
            self._look_if_due()

    def _returned(self, _frame: Any, event: str, _argument: Any) -> None:
        if event == "c_return":
            self._look_if_due()

    def _look_if_due(self) -> None:
        began = time.perf_counter()
        if began < self.next or self.is_over.is_set():
            return
        self.look()
        ended = time.perf_counter()
        self.next = ended + REST * (ended - began)

    def look(self) -> None:
        # Sampling must not initialise CUDA.
        if not self.torch.cuda.is_initialized():
            return
        import gruyere

        try:
            stats = gruyere.stats(0)
        except gruyere.GruyereError:
            return
        self.note(stats)

    def note(self, stats: Any) -> None:
        """Take a sample into account."""
        self.first = self.first or stats.reserved
        best = self.best
        # Of samples alike, the first: there the memory was taken, and later peaks find it idle.
        if best is None or stats.live * OF_LIVE > best.live:
            self.best = stats
        elif stats.live >= best.live * OF_LIVE and stats.reserved * OF_HELD > best.reserved:
            self.best = stats

    def parts(self, live_peak: int, held_peak: int) -> dict[str, int]:
        """Stop sampling. Returns the parts at the peak, or nothing if no sample came near it."""
        # For a very short program this is the first sample.
        self.look()
        self.is_over.set()
        if sys.getprofile() == self._returned:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
        best = self.best
        if best is None or best.live < OF_LIVE * live_peak or best.reserved < OF_HELD * held_peak:
            return {}
        return of(best, self.first)


def why(parts: dict[str, int], difference: int) -> Optional[tuple[Reason, int]]:
    """The part that explains `difference`, and its bytes; None if none explains half of it."""
    name = max(parts, key=lambda name: parts[name], default=None)
    if name is None or difference <= 0 or parts[name] < OF_DIFFERENCE * difference:
        return None
    return REASONS[name], parts[name]
