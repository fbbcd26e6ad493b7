"""What Gruyère holds beyond live memory where most is live, part by part: what the heap says of
itself, for who asks why it holds more than another allocator."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass
from typing import Any, Optional

# Between two looks of the thread, seconds; and after each, so many times its duration.
EVERY, REST = 0.001, 0.5
# A look counts for the peak if it saw so much of the peaks.
OF_LIVE, OF_HELD = 0.95, 0.98
# A part is a reason if it is so much of the difference.
OF_DIFFERENCE = 0.5


@dataclass(frozen=True)
class Reason:
    """Why more is held."""

    says: str
    """Behind "Gruyère holds so much more"; {} is the part's bytes."""
    remedy: str
    """What to set, or that nothing is to be set."""


REASONS = {
    "start": Reason(
        "its first growth took {} more than was needed",
        "That is the same for every program: of larger ones it is little.",
    ),
    "small": Reason("{} lay free in slabs of small blocks", "No setting changes that."),
    "streams": Reason(
        "{} was freed and waited for other streams",
        "GRUYERE_CONF=waits:budget lets a stream wait for another, and may hold less.",
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
    """The parts of what is held and neither live nor asked for; `first`: what was held at first."""
    free = max(0, stats.reserved - stats.live - stats.pending)
    idle = min(stats.idle, stats.arena_free)
    # The rest belongs to the graphs, if there are any.
    rest = max(0, free - stats.slab_free - stats.arena_free)
    return {
        "start": idle if stats.reserved_peak <= first else 0,
        "small": stats.slab_free,
        "streams": stats.pending,
        "graphs": min(stats.captured, rest),
        "idle": idle if stats.reserved_peak > first else 0,
    }


class Sampler:
    """Looks at the heap while a program runs, and keeps the look at which most was live. It looks
    whenever the program comes back from a call into C, as torch's are, and from a thread of its
    own, for a backward: so the run's times are not the program's."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.first = 0
        self.best: Optional[Any] = None
        self.is_over = threading.Event()
        self.next = 0.0
        self.thread = threading.Thread(target=self._watch, name="gruyere-parts", daemon=True)

    def start(self) -> None:
        """Begins once CUDA is in use."""
        self.torch.cuda._lazy_call(self._begin)

    def _begin(self) -> None:
        self.thread.start()
        # A profiler of the program's own comes first.
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
        # A look must not initialise CUDA.
        if not self.torch.cuda.is_initialized():
            return
        import gruyere

        try:
            stats = gruyere.stats(0)
        except gruyere.GruyereError:
            return
        self.note(stats)

    def note(self, stats: Any) -> None:
        """Takes a look in."""
        self.first = self.first or stats.reserved
        if self.best is None or stats.live > self.best.live:
            self.best = stats

    def parts(self, live_peak: int, held_peak: int) -> dict[str, int]:
        """What was found, where a look came near the peaks; else nothing. The end of looking."""
        # For a program that has just begun, this is the first look.
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
    """The part that explains `difference`, and its bytes; None where none explains half of it."""
    name = max(parts, key=lambda name: parts[name], default=None)
    if name is None or difference <= 0 or parts[name] < OF_DIFFERENCE * difference:
        return None
    return REASONS[name], parts[name]
