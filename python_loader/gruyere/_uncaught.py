"""Keeps the record of a program that ends by an out-of-memory which nobody has caught.

A program that ends by an exception ends cleanly, and takes its record away; what was live is freed
on the way out. So the record is copied when Python shows the exception, while the traceback still
holds everything, and `gruyere post` finds it.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import Any, Optional

from . import _library

_SAYS = (
    "gruyere: `gruyere post {pid}` has what was live then, `gruyere post {pid} --html` makes a page"
    " of it"
)


def install(torch: Any) -> None:
    """Called by enable()."""
    if os.environ.get("GRUYERE_SANDBOX") == "1":
        return
    error = torch.cuda.OutOfMemoryError
    before = sys.excepthook

    def hook(
        kind: type[BaseException], value: BaseException, traceback: Optional[TracebackType]
    ) -> None:
        before(kind, value, traceback)
        if issubclass(kind, error) and _library.library().gruyere_keep_record() == 0:
            print(_SAYS.format(pid=os.getpid()), file=sys.stderr)

    sys.excepthook = hook
