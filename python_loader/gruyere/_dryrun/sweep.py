"""Sweeps: runs with several values of one of the program's arguments."""

from __future__ import annotations

import re
from typing import Any, Callable, Optional

from .._errors import GruyereError
from .runs import Ran, called

_FORMS = (
    "expected NAME=1,2,4 or NAME=1..64, with --flag: before the values if the program's arguments "
    "have no {NAME}"
)
_RANGE = re.compile(r"([0-9]+)\.\.([0-9]+)\Z")


class Sweep:
    """The values to try, and the results. `text`: NAME=VALUES or NAME=--flag:VALUES."""

    def __init__(self, text: str, arguments: tuple[str, ...]) -> None:
        """Raises GruyereError if `text` has another form, or if the program's arguments have no
        place for the value."""
        self.name, _, values = text.partition("=")
        self.flag: Optional[str] = None
        if values.startswith("-") and ":" in values:
            self.flag, _, values = values.rpartition(":")
        self.range: Optional[tuple[int, int]] = None
        self.values: list[str] = []
        if not self.name or not all(values.split(",")):
            raise GruyereError(f"--sweep {text}: {_FORMS}")
        if ".." in values:
            match = _RANGE.match(values)
            low, high = map(int, match.groups()) if match else (1, 0)
            if low > high:
                raise GruyereError(f"--sweep {text}: {values}: expected whole numbers, as in 1..64")
            self.range = low, high
        else:
            self.values = values.split(",")
        place = f"{{{self.name}}}"
        if self.flag is None and not any(place in word for word in arguments):
            raise GruyereError(
                f"--sweep {self.name}: the program's arguments have no {place}; write it where the "
                f"value goes, or name the flag: --sweep {self.name}=--batch-size:1..64"
            )
        self.program = arguments
        self.rows: list[dict[str, Any]] = []

    def first(self) -> str:
        """A value that is always tried."""
        return str(self.range[0]) if self.range else self.values[0]

    def arguments(self, value: str) -> tuple[str, ...]:
        """The program's arguments with this value: in place of `{name}`, or after the flag if the
        arguments have it, else appended with the flag."""
        words = [word.replace(f"{{{self.name}}}", value) for word in self.program]
        if self.flag is None:
            return tuple(words)
        for index, word in enumerate(words):
            if word == self.flag and index + 1 < len(words):
                return (*words[: index + 1], value, *words[index + 2 :])
            if word.startswith(f"{self.flag}="):
                return (*words[:index], f"{self.flag}={value}", *words[index + 1 :])
        return (*words, self.flag, value)

    def search(self, gpu: dict[str, Any], allocator: str, run: Callable[[str], Ran]) -> None:
        """Run every listed value, or bisect for the largest value of the range that fits. Assumes
        that if a value fits, every smaller value fits."""

        def fits(value: str) -> bool:
            ran = run(value)
            self.rows.append({
                "value": value, "gpu": gpu["id"], "allocator": called(allocator),
                "fits": ran.fits, "peak_live": ran.found.allocated_peak,
                "peak_held": ran.found.physical_peak, "short": ran.short,
            })  # fmt: skip
            return ran.fits

        if not self.range:
            for value in self.values:
                fits(value)
            return
        low, high = self.range
        if not fits(str(low)) or low == high or fits(str(high)):
            return
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(str(middle)) else (low, middle)

    def largest(self, gpu: str, allocator: str) -> Any:
        """The largest value that fits; None if none does."""
        fit = [
            row["value"]
            for row in self.rows
            if row["fits"] and (row["gpu"], row["allocator"]) == (gpu, allocator)
        ]
        return max(fit, key=self._order, default=None)

    def _order(self, value: str) -> float:
        """The sort key of a value: its size if all values are numbers, else its place in the
        list."""
        try:
            numbers = {word: float(word) for word in (*self.values, value)}
        except ValueError:
            return self.values.index(value)
        return numbers[value]

    def chosen(self, gpu: str) -> str:
        """The value for the rest of the answer: the largest that fits on `gpu` with any
        allocator."""
        of = {row["allocator"] for row in self.rows}
        best = [value for name in of if (value := self.largest(gpu, name)) is not None]
        return max(best, key=self._order) if best else self.first()

    def table(self) -> dict[str, Any]:
        """The results as plain data."""
        pairs = list(dict.fromkeys((row["gpu"], row["allocator"]) for row in self.rows))
        key = int if self.range else self.values.index
        return {
            "name": self.name,
            "flag": self.flag,
            "range": self.range,
            "rows": sorted(
                self.rows,
                key=lambda row: (pairs.index((row["gpu"], row["allocator"])), key(row["value"])),
            ),  # fmt: skip
            "largest": [
                {"gpu": gpu, "allocator": allocator, "value": self.largest(gpu, allocator)}
                for gpu, allocator in pairs
            ],
        }
