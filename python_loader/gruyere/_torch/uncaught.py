"""Keeping the record of a program that ends with an uncaught out-of-memory error.

A program that ends with an exception exits cleanly: it frees its live memory and removes its
record. So the record is copied when Python prints the exception, while the traceback still keeps
everything alive, and `gruyere post` finds the copy.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import Any, Optional

from .._native import library

_SAYS = (
    "gruyere: `gruyere post {pid}` shows what was live then, `gruyere post {pid} --html` writes it "
    "as a page"
)


def install(torch: Any) -> None:
    """Install the exception hook. Called by enable()."""
    if os.environ.get("GRUYERE_SANDBOX") == "1":
        return
    error = torch.cuda.OutOfMemoryError
    before = sys.excepthook

    def hook(
        kind: type[BaseException], value: BaseException, traceback: Optional[TracebackType]
    ) -> None:
        before(kind, value, traceback)
        if issubclass(kind, error) and library.load().gruyere_keep_record() == 0:
            print(_SAYS.format(pid=os.getpid()), file=sys.stderr)

    sys.excepthook = hook
