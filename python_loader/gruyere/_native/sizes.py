"""Sizes in the format of GRUYERE_CONF."""

from __future__ import annotations

import re
from typing import Callable, Union

from .._errors import GruyereError

_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_FORM = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([KMGT]iB|B|%|)\s*\Z")


def size(what: str, given: Union[int, str], total: Callable[[], int]) -> int:
    """`given` in bytes: an int, "20GiB", "512MiB", or "90%" of what `total` returns. Raises
    GruyereError, which names `what`, if it is none of these."""
    if isinstance(given, int) and not isinstance(given, bool) and 0 <= given < 1 << 64:
        return given
    match = _FORM.match(given) if isinstance(given, str) else None
    if match:
        number, unit = match.groups()
        if unit == "%" and float(number) <= 100:
            return int(total() * (float(number) / 100))
        if unit != "%" and (unit not in ("", "B") or number.isdigit()):
            found = (
                int(number) * _UNITS[unit]
                if number.isdigit()
                else int(float(number) * _UNITS[unit])
            )
            if found < 1 << 64:
                return found
    raise GruyereError(
        f"{what}={given!r}: not a size; expected 512KiB, 2MiB, 1.5GiB, 90% (of the device), or a "
        "number of bytes"
    )
