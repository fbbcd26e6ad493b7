"""Comparison of the requests of two runs with different values on the device."""

from __future__ import annotations

from collections import defaultdict
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Optional

if TYPE_CHECKING:
    from .worker import Found


def difference(first: dict[str, Any], second: dict[str, Any]) -> Optional[dict[str, Any]]:
    """The first difference between two sequences of requests (`live.analyse`); None if they are
    equal.

    Requests are compared thread by thread, since the requests of concurrent threads may come in any
    order.
    """
    ours, theirs = _by_thread(first), _by_thread(second)
    parted: list[tuple[int, Optional[int], Optional[int]]] = []
    for thread in {*ours, *theirs}:
        mine, other = ours.get(thread, []), theirs.get(thread, [])
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


def begins(first: Found, second: Found) -> bool:
    """Whether the second run began with the requests of the first, thread by thread, as far as both
    were analysed."""
    if not first.analysis or not second.analysis:
        return True
    ours, theirs = _sizes(first.analysis["sequence"]), _sizes(second.analysis["sequence"])
    return all(theirs.get(thread, [])[: len(sizes)] == sizes for thread, sizes in ours.items())


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


def _by_thread(sequence: dict[str, Any]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for index, group in enumerate(sequence["groups"]):
        found[sequence["threads"][group]].append(index)
    return found
