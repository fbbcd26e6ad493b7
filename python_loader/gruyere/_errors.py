"""What this package raises and warns of."""

from __future__ import annotations

import sys
import warnings


class GruyereError(RuntimeError):
    """Gruyère cannot do what was asked; the text says why, and what to do."""


class NoCuda(GruyereError):
    """There is no CUDA here that Gruyère could serve."""

    def with_ways(self, _what: str) -> str:
        """The text, and what can be done with the program all the same."""
        return str(self)


class NoGpu(NoCuda):
    """This torch is built for CUDA, and there is no GPU."""

    def with_ways(self, what: str) -> str:
        return (
            f"{self}: no GPU\n"
            f"Without one: gruyere dryrun {what} (does it fit?), or on a stand-in GPU:\n"
            f"gruyere compare --stand-in {what}, python -m gruyere --stand-in {what}"
        )


class GruyereWarning(UserWarning):
    """Something will not do what the program may expect of it; the text says what to use
    instead."""


_said: set[str] = set()

# Frames to skip in search of the program's line.
_INSIDE = ("gruyere", "torch", "importlib", "runpy")


def warn_once(text: str) -> None:
    """Warns of `text`, once in the life of the process, at the line of the program that led to
    it."""
    if text in _said:
        return
    _said.add(text)
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDE:
        frame = frame.f_back
    warnings.warn_explicit(text, GruyereWarning, frame.f_code.co_filename, frame.f_lineno)
