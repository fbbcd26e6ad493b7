"""Keeping the record of a program that ends with an uncaught out-of-memory error.

A program that ends with an exception exits cleanly: it frees its live memory and removes its
record. So the record is copied when Python prints the exception, while the traceback still keeps
everything alive, and `gruyere post` finds the copy.
"""

from __future__ import annotations

import functools
import os
import sys
from types import TracebackType
from typing import Any, Callable, Optional, TypeVar

from .._errors import say
from .._native import library

_SAYS = (
    "gruyere: `gruyere post {pid}` shows what was live then, `gruyere post {pid} --html` writes it "
    "as a page"
)

_Result = TypeVar("_Result")
# torch's class, once installed.
_error: Any = ()


def install(torch: Any) -> None:
    """Install the exception hook. Called by enable()."""
    if os.environ.get("GRUYERE_SANDBOX") == "1":
        return
    global _error
    _error = torch.cuda.OutOfMemoryError
    before = sys.excepthook

    def hook(
        kind: type[BaseException], value: BaseException, traceback: Optional[TracebackType]
    ) -> None:
        before(kind, value, traceback)
        if issubclass(kind, _error):
            _keep()

    sys.excepthook = hook


def keeping(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """Wrap the main function of a process whose caller catches and prints its exceptions itself."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> _Result:
        try:
            return function(*args, **kwargs)
        except _error:
            _keep()
            raise

    return wrapper


def _keep() -> None:
    if library.load().gruyere_keep_record() == 0:
        say(_SAYS.format(pid=os.getpid()))
