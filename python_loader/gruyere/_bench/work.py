"""Whether runs under several allocators did the same work. Only then do their figures compare."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from .measure import COMPLETED, Result
from .table import size

# What the requests of one program may differ by under two allocators: bytes, and share of the peak.
# Blocks that other streams use are freed a little later under one than under another.
ROUNDING, SHARE = 4 << 20, 0.03


def apart(one: int, other: int) -> bool:
    """Whether two peaks differ by more than the allocators themselves explain."""
    low, high = sorted((one, other))
    return high - low > max(ROUNDING, low * SHARE)


def _same_work(one: Result, other: Result) -> bool:
    """Whether two runs had the same peak, by one measure at least. Requested bytes leave out what
    an allocator adds to a block (torch's default does not split off every remainder), but torch
    counts a block that other streams use until their work is done. cudaMallocAsync counts live
    bytes only, without rounding.

    If torch restored the state of a graphs' pool, the peak may be what is live meanwhile: each
    allocator makes blocks anew in its own way. Then what each step requested decides."""
    if not apart(one.allocated_peak, other.allocated_peak):
        return True
    if not apart(
        one.requested_peak or one.allocated_peak, other.requested_peak or other.allocated_peak
    ):
        return True
    if not one.restores or one.restores != other.restores:
        return False
    # Equal numbers of restores and of steps part the runs alike.
    return len(one.requested) == len(other.requested) and not any(
        apart(*amounts) for amounts in zip(one.requested, other.requested)
    )


def differences(rows: Sequence[tuple[str, Sequence[Result]]]) -> list[str]:
    """What differs between the runs of the rows (name and runs) that completed, with each row's
    figures; nothing: they did the same work."""
    done = [
        (name, results)
        for name, results in rows
        if all(result.outcome == COMPLETED for result in results)
    ]
    every = [result for _, results in done for result in results]
    found = []
    if not all(_same_work(*two) for two in combinations(every, 2)):
        peaks = [
            (name, sorted({result.allocated_peak for result in results}))
            for name, results in done
        ]
        each = [f"{_between([size(peak) for peak in of])} under {name}" for name, of in peaks]
        found.append(f"peak live was {listed(each)}")
    if len({result.steps for result in every}) > 1:
        counts = [(name, sorted({result.steps for result in results})) for name, results in done]
        each = [f"{_between([str(count) for count in of])} under {name}" for name, of in counts]
        found.append(f"the steps were {listed(each)}")
    caught = [
        f"{most} under {name}"
        for name, results in done
        if (most := max(result.caught for result in results))
    ]
    if found and caught:
        found.append(f"the program caught out-of-memory errors and went on: {listed(caught)}")
    return found


def _between(figures: list[str]) -> str:
    """The least and the most of sorted figures."""
    least, most = figures[0], figures[-1]
    return least if least == most else f"{least} to {most}"


def listed(words: Sequence[str]) -> str:
    """The words as a list in a sentence."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))
