"""The end of a process whose program was stopped after its steps.

A program that ends by itself has often come to the end of its threads. One that is stopped may have
a daemon thread in a call of C++, which needs the GIL at its end. If the interpreter shuts down
meanwhile, Python up to 3.13 ends the thread inside C++ code that does not allow it, and the process
aborts. So such a process ends as the interpreter would, but for the shutdown of the interpreter
itself.
"""

from __future__ import annotations

import atexit
import sys
import threading
from contextlib import suppress
from typing import Any, Optional

# Whether the program has been told to end.
_told = False


def told() -> None:
    """The program is told to end before its own end."""
    global _told
    _told = True


class Ending:
    """Surrounds the run of a program, with the handling of its errors."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if _told and (error is None or isinstance(error, SystemExit)) and _has_daemons():
            _leave(_status(error))


def _has_daemons() -> bool:
    return any(thread.daemon for thread in threading.enumerate())


def _status(error: Optional[SystemExit]) -> int:
    """The exit status of a program that ends by this error, which may say something."""
    code = error.code if error is not None else None
    if code is None or isinstance(code, int):
        return code or 0
    print(code, file=sys.stderr)
    return 1


def _leave(code: int) -> None:
    import ctypes

    # What the interpreter does at its end: other threads, exit handlers, streams.
    shutdown: Any = threading
    # By Ctrl-C it waits for them no more.
    with suppress(KeyboardInterrupt):
        shutdown._shutdown()
    atexit._run_exitfuncs()
    if not _has_daemons():
        # The handlers have ended them, and the interpreter can end by itself.
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    # C's exit() runs the exit handlers of libraries (they close the record and the stand-in's
    # books). The GIL is kept: no thread goes on in Python meanwhile.
    ctypes.PyDLL(None).exit(code)
