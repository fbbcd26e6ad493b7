"""The package's exceptions, warnings and messages."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Optional


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


# Control characters, and those that hide text or turn the direction of writing: as in
# crates/record/src/plain.rs.
_OBEYED = re.compile("[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]")


def plain(text: str) -> str:
    """`text` of somebody else, such as a file's name, safe for a line of a terminal."""
    return _OBEYED.sub(" ", text)


def say(text: str) -> None:
    """Print `text` to stderr, if it is open, in one write: print() writes the end of a line by
    itself to an unbuffered stderr, so that the messages of a job's ranks would share lines."""
    if sys.stderr is not None:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


_said: set[str] = set()


class _Waiting(threading.local):
    """The warnings that this thread holds back, if it does."""

    lines: Optional[list[str]] = None


_waiting = _Waiting()

# Frames to skip in search of the program's line.
_INSIDE = ("gruyere", "torch", "importlib", "runpy", "contextlib")


def warn_once(text: str) -> None:
    """Issue the warning `text`, once per process, at the line of the program that led to it."""
    if text in _said:
        return
    if _waiting.lines is not None:
        _waiting.lines.append(text)
        return
    _said.add(text)
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDE:
        frame = frame.f_back
    warnings.warn_explicit(text, GruyereWarning, frame.f_code.co_filename, frame.f_lineno)


@contextlib.contextmanager
def warning_afterwards() -> Iterator[None]:
    """Hold this thread's warnings back until the change inside is complete: a program that makes
    errors of them must not be left with half of it. A change that fails issues none."""
    lines: list[str] = []
    _waiting.lines = lines
    try:
        yield
    finally:
        _waiting.lines = None
    for line in lines:
        warn_once(line)
