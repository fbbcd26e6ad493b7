"""What the steps that were run say of steps that were not: how much they differ, and what of a
step's memory grows with its batch and its length."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Any, Optional

if TYPE_CHECKING:
    from .live import Block, History

# Steps whose activations differ by more than this have different lengths or batches.
FEW = 0.05


def scope(history: History, changes: list[tuple[int, int, Block]]) -> Optional[dict[str, Any]]:
    """None where torch did not say which step asks, or no step had a backward.

    - `activations`: of each step, the most that its forward left for its backward at a time, or was
      computed again there. It goes with batch and length, and is the same in the first step, which
      has no optimiser's states yet, as in later ones.
    - `fixed_bytes`, `growing_bytes`: what does not grow with the batch and what does, at the moment
      of all steps that would be the peak with twice the batch. Temporaries count as growing, which
      those of the size of a weight do not.
    """
    from .live import ACTIVATIONS, RECOMPUTED, TEMPORARIES
    from .hooks import OPTIMIZER

    steps = history.seen.steps
    if not history.told or not steps:
        return None
    most = [0] * len(steps)
    total = forward = temporaries = 0
    fixed = growing = 0
    for _, change, block in changes:
        total += change
        if block.kind in (ACTIVATIONS, RECOMPUTED):
            forward += change
        elif block.kind == TEMPORARIES and block.phase != OPTIMIZER:
            temporaries += change
        if change < 0 or not forward:
            continue
        step = bisect_right(steps, block.mark)
        if step < len(most):
            most[step] = max(most[step], forward)
        varies = forward + temporaries
        if total + varies > fixed + 2 * growing:
            fixed, growing = total - varies, varies
    if not growing:
        return None
    return {"activations": most, "fixed_bytes": fixed, "growing_bytes": growing}


def spread(report: dict[str, Any]) -> Optional[tuple[int, int]]:
    """The least and the most that a step's activations came to; None where steps do not differ, or
    the program ended by itself, so that there are no others."""
    found = report.get("steps")
    program = report["program"]
    if not found or program["steps"] < program["steps_asked"]:
        return None
    least, most = min(found["activations"]), max(found["activations"])
    # Memory left behind by steps is reported as that.
    left = report["growth"]["bytes_a_step"] * program["steps"] if report["growth"] else 0
    return (least, most) if most > least * (1 + FEW) + left else None
