"""The package's exceptions, warnings and messages."""

from __future__ import annotations

import sys
import warnings


class GruyereError(RuntimeError):
    """Gruyère cannot do what was requested; the message says why and what to do."""


class NoCuda(GruyereError):
    """CUDA is not available to this process."""

    def with_ways(self, _what: str) -> str:
        """The message, and what can still be done with the program."""
        return str(self)


class NoGpu(NoCuda):
    """This torch is built for CUDA, but there is no GPU."""

    def with_ways(self, what: str) -> str:
        return (
            f"{self}: no GPU\n"
            f"Without one: gruyere dryrun {what} (does it fit?), or on a stand-in GPU:\n"
            f"gruyere compare --stand-in {what}, python -m gruyere --stand-in {what}"
        )


class GruyereWarning(UserWarning):
    """Something will not work as the program may expect; the message says what to use instead."""


def say(text: str) -> None:
    """Print `text` to stderr, if it is open, in one write: print() writes the end of a line by
    itself to an unbuffered stderr, so that the messages of a job's ranks would share lines."""
    if sys.stderr is not None:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


_said: set[str] = set()

# Frames to skip in search of the program's line.
_INSIDE = ("gruyere", "torch", "importlib", "runpy")


def warn_once(text: str) -> None:
    """Issue the warning `text`, once per process, at the line of the program that led to it."""
    if text in _said:
        return
    _said.add(text)
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDE:
        frame = frame.f_back
    warnings.warn_explicit(text, GruyereWarning, frame.f_code.co_filename, frame.f_lineno)
