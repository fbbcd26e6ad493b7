"""Amounts as text."""

from __future__ import annotations

from .._bench import table


def size(number: int) -> str:
    """A number of bytes as text, down to single bytes."""
    if number >= 1 << 20:
        return table.size(number)
    return f"{number >> 10} KiB" if number >= 1 << 10 else f"{number} B"


def about(number: float) -> str:
    """A number of bytes to two digits, the precision of the estimate."""
    for unit, word in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if number >= unit:
            found = number / unit
            return f"{found:.1f} {word}" if found < 9.95 else f"{float(f'{found:.2g}'):.0f} {word}"
    return size(int(number))


def signed(margin: int) -> str:
    """A margin as text, negative if memory is missing."""
    return size(margin) if margin >= 0 else f"-{size(-margin)}"


def times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"
