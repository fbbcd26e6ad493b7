"""Comparison of the requests of two runs with different values on the device."""

from __future__ import annotations

from collections import Counter, defaultdict
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Optional

if TYPE_CHECKING:
    from .worker import Found


# The outermost frame of threads that Python starts.
_POOLED = "threading.py:_bootstrap"
# Where the peaks of two runs differ by less than this share, requests of less than the other share
# of the peak decide nothing: the number behind a mean, a metric.
_EQUAL, _LITTLE = 0.001, 0.0001


def little(first: dict[str, Any], second: dict[str, Any]) -> int:
    """The bytes of a request from which on it counts in a comparison of two analyses."""
    two = sorted((first["peak"]["bytes"], second["peak"]["bytes"]))
    return int(two[0] * _LITTLE) if two[1] - two[0] <= two[1] * _EQUAL else 0


def difference(
    first: dict[str, Any], second: dict[str, Any], least: int = 0
) -> Optional[dict[str, Any]]:
    """The first difference between two sequences of requests (`live.analyse`), of those of `least`
    bytes or more; None if they are equal.

    Requests are compared thread by thread, since the requests of concurrent threads may come in any
    order. Python's own threads are compared together, as they may be of a pool, and each size by
    its number.
    """
    ours, theirs = _by_thread(first, least), _by_thread(second, least)
    parted: list[tuple[int, Optional[int], Optional[int]]] = []
    for thread in {*ours, *theirs}:
        mine, other = ours.get(thread, []), theirs.get(thread, [])
        if thread.endswith(_POOLED):
            more = _beyond(first, mine, _counted(second, other))
            less = _beyond(second, other, _counted(first, mine))
            if more is not None or less is not None:
                parted.append((more if more is not None else len(first["sizes"]), more, less))
            continue
        for left, right in zip(mine, other):
            if first["sizes"][left] != second["sizes"][right]:
                parted.append((left, left, right))
                break
        else:
            if len(mine) > len(other):
                parted.append((mine[len(other)], mine[len(other)], None))
            elif len(other) > len(mine):
                parted.append((other[len(mine)], None, other[len(mine)]))
    if not parted:
        return None
    number, zeros, random = min(parted, key=itemgetter(0))
    asked = {
        "zeros": None if zeros is None else _request(first, zeros),
        "random": None if random is None else _request(second, random),
    }
    # The run that made a further request has the line.
    at: dict[str, Any] = asked["random"] or asked["zeros"] or {}
    return {"request": number + 1, "line": at["line"], "read": at["read"], **asked}


def parted(first: dict[str, Any], second: dict[str, Any]) -> Optional[dict[str, Any]]:
    """The first difference that counts between two analyses."""
    return difference(first["sequence"], second["sequence"], little(first, second))


def begins(first: Found, second: Found) -> bool:
    """Whether the second run began with the requests of the first, thread by thread, as far as both
    were analysed."""
    if not first.analysis or not second.analysis:
        return True
    ours, theirs = _sizes(first.analysis["sequence"]), _sizes(second.analysis["sequence"])
    return all(
        not Counter(sizes) - Counter(theirs.get(thread, []))
        if thread.endswith(_POOLED)
        else theirs.get(thread, [])[: len(sizes)] == sizes
        for thread, sizes in ours.items()
    )


def _sizes(sequence: dict[str, Any]) -> dict[str, list[int]]:
    return {
        thread: [sequence["sizes"][index] for index in indices]
        for thread, indices in _by_thread(sequence).items()
    }


def _request(sequence: dict[str, Any], index: int) -> dict[str, Any]:
    lines, read = sequence["lines"], sequence["read"][index]
    return {
        "bytes": sequence["sizes"][index],
        "line": lines[sequence["at"][index]],
        "inside": lines[sequence["inside"][index]],
        "read": lines[read] if read >= 0 else None,
    }


def _by_thread(sequence: dict[str, Any], least: int = 0) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for index, group in enumerate(sequence["groups"]):
        if sequence["sizes"][index] >= least:
            found[sequence["threads"][group]].append(index)
    return found


def _counted(sequence: dict[str, Any], indices: list[int]) -> Counter[int]:
    return Counter(sequence["sizes"][index] for index in indices)


def _beyond(sequence: dict[str, Any], indices: list[int], there: Counter[int]) -> Optional[int]:
    """The first of these requests whose size comes more often than in `there`."""
    for index in indices:
        size = sequence["sizes"][index]
        if not there[size]:
            return index
        there[size] -= 1
    return None
