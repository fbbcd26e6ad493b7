"""The program's optimisers: which of them have stepped, and which a run has to wait for.

The first optimiser to step leads the steps (`_steps._Leader`). Others may step more rarely: a
generator's, once for five steps of its critic's.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from typing import Any, Optional

from .lines import Lines

# The number of steps that an optimiser makes in a run: its states are made in the first, and are
# there beside the activations in the second.
ENOUGH = 2
# A run goes on for this many times its steps until each optimiser has stepped at all, and for this
# many until each has made enough steps.
FOR_ONE, FOR_ALL = 10, 4


class Known:
    """What is known of an optimiser, also when it is gone."""

    def __init__(self, optimizer: Any, line: str) -> None:
        self.name = f"{type(optimizer).__name__} made at {line}"
        self.of = weakref.ref(optimizer)
        self.times = 0


class Optimizers:
    def __init__(self) -> None:
        self.pid = os.getpid()
        self.all: list[Known] = []
        self.by_id: dict[int, Known] = {}
        # Those that had not stepped at the end of the last step, by name.
        self.waiting: list[Known] = []

    def watch(self, torch: Any, lines: Lines) -> None:
        """Install the hook. Call once torch is imported."""
        kind = getattr(getattr(torch, "optim", None), "Optimizer", None)
        if kind is None:
            return
        original = kind.__init__

        @functools.wraps(original)
        def init(optimizer: Any, *arguments: Any, **options: Any) -> None:
            original(optimizer, *arguments, **options)
            if os.getpid() == self.pid:
                self.made(optimizer, lines.of_stack(sys._getframe(1)))

        kind.__init__ = init

    def made(self, optimizer: Any, line: str) -> None:
        known = self.by_id.get(id(optimizer))
        if known is None or known.of() is not optimizer:
            known = self.by_id[id(optimizer)] = Known(optimizer, line)
            self.all.append(known)

    def stepped(self, optimizer: Any) -> None:
        known = self.by_id.get(id(optimizer))
        if known is not None and known.of() is optimizer:
            known.times += 1

    def step_is_over(self) -> None:
        self.waiting = self.behind(1)

    def behind(self, times: int) -> list[Known]:
        """The optimisers that have stepped less often than this and that step memory of the device
        which no other one steps: a wrapper has the parameters of the optimiser inside."""
        slow = [known for known in self.all if known.times < times and known.of() is not None]
        if not slow:
            return []
        covered = {
            id(value)
            for known in self.all
            if known.times >= times
            for value in _parameters(known.of())
        }
        return [
            known
            for known in slow
            if any(
                _is_trained(value)
                for value in _parameters(known.of())
                if id(value) not in covered
            )
        ]

    def goes_on(self, steps: int, asked: int) -> bool:
        """Whether a run of `asked` steps goes on after `steps`, for optimisers that are behind."""
        if steps < asked * FOR_ALL and self.behind(min(ENOUGH, asked)):
            return True
        return steps < asked * FOR_ONE and bool(self.behind(1))

    def never(self) -> list[str]:
        """The optimisers that existed when the last step ended, or exist now, and never stepped."""
        names = [known.name for known in (*self.waiting, *self.behind(1)) if not known.times]
        return list(dict.fromkeys(names))


def short(made: int, steps: int, asked: int, caught: int) -> str:
    """Why a program that ended by itself does not fit for all that it completed; "" if its steps
    count, or if it has no optimiser. `made`: the number of its optimisers; `caught`: how often it
    ran out of memory."""
    if steps >= asked or not (made or steps) or not (caught or not steps):
        return ""
    did = f"it made {steps} of the {asked} steps asked"
    if caught:
        times = f"{caught} time{'s' * (caught != 1)}"
        return f"{did}: it ran out of memory {times}, caught the error and went on"
    return f"{did}: it ended before its optimiser had stepped, perhaps by a value of the device"


def _parameters(optimizer: Optional[Any]) -> list[Any]:
    groups = getattr(optimizer, "param_groups", ())
    return [value for group in groups for value in group.get("params", ())]


def _is_trained(value: Any) -> bool:
    try:
        return bool(value.is_cuda and value.requires_grad and value.numel())
    except Exception:
        # A tensor of another kind may raise any error.
        return False
