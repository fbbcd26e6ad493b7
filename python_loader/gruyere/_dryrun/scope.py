"""Estimates for steps that were not run: how much the steps differ, and how much of a step's memory
grows with its batch and length."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Optional

if TYPE_CHECKING:
    from .live import Block, History

# The bytes of each request of a forward: by line, then by step and backward.
Requests = dict[str, dict[tuple[int, int], list[int]]]
# Steps whose activations differ by more than this have different lengths or batches.
FEW = 0.05


def scope(
    history: History,
    changes: list[tuple[int, int, Block]],
    partial: Sequence[int],
    in_vain: int = 0,
) -> Optional[dict[str, Any]]:
    """The estimates; None if torch did not record the step of each request, or no step had a
    backward.

    What was requested before a request was refused in the same step does not count: the program
    tried the step again, with less. Nor do the first `in_vain` steps, made before the last refusal.

    - `activations`: for each step, the most memory at any moment that its forward left for its
      backward, or that was recomputed there. It depends on batch and length only, so the first
      step, which has no optimiser states yet, is comparable with later ones.
    - `requested`: for each step, all bytes requested by its forward, or by the largest of several,
      at lines that ran after the first step, too. Unlike the activations it does not depend on when
      a batch that is fetched ahead is freed, nor on what is made before the loop.
    - `partial`: the numbers of the steps that are only a part of one (`partial.py`).
    - `fixed_bytes`, `growing_bytes`: the memory that does not grow with the batch, and the memory
      that does, at the moment that would be the peak with twice the batch. Temporaries count as
      growing, although those of a weight's size do not grow.
    """
    from .live import ACTIVATIONS, OTHER, RECOMPUTED, TEMPORARIES
    from .hooks import OPTIMIZER, PROGRAM

    steps = history.seen.steps
    if not history.told or not steps:
        return None
    most = [0] * len(steps)
    # For each step, what does not grow and what does, at the moment that counts.
    parts = [(0, 0)] * len(steps)
    total = forward = temporaries = 0
    # Until when each step was tried in vain, with another batch perhaps.
    tried = [-1] * len(steps)
    for mark in history.refused:
        step = bisect_right(steps, mark)
        if step < len(tried):
            tried[step] = max(tried[step], mark)
    requested: Requests = {}
    for _, change, block in changes:
        total += change
        if block.kind in (ACTIVATIONS, RECOMPUTED):
            forward += change
        elif block.kind == TEMPORARIES and block.phase != OPTIMIZER:
            temporaries += change
        if change < 0:
            continue
        step = bisect_right(steps, block.mark)
        if step >= len(most) or block.mark <= tried[step]:
            continue
        if block.phase == PROGRAM and block.kind in (ACTIVATIONS, TEMPORARIES, OTHER):
            following = bisect_right(history.seen.backwards, block.mark)
            forwards = requested.setdefault(block.line, {})
            forwards.setdefault((step, following), []).append(change)
        if not forward:
            continue
        most[step] = max(most[step], forward)
        varies = forward + temporaries
        fixed, growing = parts[step]
        if total + varies > fixed + 2 * growing:
            parts[step] = total - varies, varies
    if len(steps) <= in_vain:
        return None
    fixed, growing = max(parts[in_vain:], key=lambda part: part[0] + 2 * part[1])
    if not growing:
        return None
    return {
        "activations": most[in_vain:],
        "requested": _by_forwards(requested, len(most))[in_vain:],
        "partial": [step - in_vain for step in partial if step > in_vain],
        "fixed_bytes": fixed,
        "growing_bytes": growing,
    }


def _by_forwards(requested: Requests, steps: int) -> list[int]:
    totals: Counter[tuple[int, int]] = Counter()
    for forwards in requested.values():
        later = [len(sizes) for (step, _), sizes in forwards.items() if step]
        if not later:
            continue
        for (step, backward), sizes in forwards.items():
            # The first step has what was made before the loop, too: the first batch at least, if
            # batches are fetched ahead. A later step tells how many blocks of the line are its own.
            totals[step, backward] += sum(sizes if step else sizes[-max(later) :])
    largest = [0] * steps
    for (step, _), total in totals.items():
        largest[step] = max(largest[step], total)
    return largest


def least(found: dict[str, Any], of: str) -> int:
    """The least that a step has of `activations` or `requested`. A step that is only a part of one
    counts if no other was run."""
    whole = [number for step, number in enumerate(found[of], 1) if step not in found["partial"]]
    return int(min(whole or found[of]))


def spread(report: dict[str, Any]) -> Optional[tuple[int, int]]:
    """The smallest and the largest activations of a step; None if the steps do not differ, or if
    the program ended by itself, so that there are no further steps."""
    found = report.get("steps")
    program = report["program"]
    if not found or program["steps"] < program["steps_asked"]:
        return None
    if max(found["requested"]) <= least(found, "requested") * (1 + FEW):
        return None
    low, most = least(found, "activations"), max(found["activations"])
    # Memory that steps leave behind is reported separately.
    left = report["growth"]["bytes_a_step"] * program["steps"] if report["growth"] else 0
    return (low, most) if most > low * (1 + FEW) + left else None
