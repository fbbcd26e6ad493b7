"""Steps that are only a part of a step, so that their activations are no measure of another's:

- one that replays CUDA graphs and captures none: what it needs was requested by the capture;
- the first, if several optimisers take turns: it ends where the first of them steps.
"""

from __future__ import annotations

import functools
import os
from typing import Any, Callable

from .optimizers import Known


class Partial:
    def __init__(self) -> None:
        self.pid = os.getpid()
        # The number of steps that have ended.
        self.steps = 0
        self.replayed: set[int] = set()
        self.captured: set[int] = set()
        # The optimisers that had yet to step when the first step ended.
        self.waiting: list[Known] = []
        self.is_first_partial = False

    def watch(self, torch: Any) -> None:
        """Install the hooks. Call once torch is imported."""
        graph = getattr(torch.cuda, "CUDAGraph", None)
        for name, of in (("replay", self.replayed), ("capture_begin", self.captured)):
            if hasattr(graph, name):
                setattr(graph, name, self._noting(getattr(graph, name), of))

    def _noting(self, original: Callable[..., Any], of: set[int]) -> Callable[..., Any]:
        @functools.wraps(original)
        def noting(*arguments: Any, **options: Any) -> Any:
            if os.getpid() == self.pid:
                of.add(self.steps)
            return original(*arguments, **options)

        return noting

    def stepped(self, optimizer: Any) -> None:
        """An optimiser has stepped."""
        if self.steps == 1 and any(known.of() is optimizer for known in self.waiting):
            self.is_first_partial = True

    def step_is_over(self, waiting: list[Known]) -> None:
        """A step has ended; `waiting`: the optimisers that have not stepped and have memory of
        their own to step (`Optimizers.waiting`)."""
        if not self.steps:
            self.waiting = waiting
        self.steps += 1

    def found(self) -> list[int]:
        """The numbers of these steps, from 1."""
        partial = self.replayed - self.captured
        if self.is_first_partial:
            partial.add(0)
        return [step + 1 for step in sorted(partial) if step < self.steps]
