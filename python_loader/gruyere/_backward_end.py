"""Lets the threads of a failed backward come to rest before the interpreter ends.

From 2.15 on, torch keeps a Python object (a copy of the caller's `contextvars`) with each backward.
Where a backward fails, the thread that has called it goes on while a thread of torch's
(`pt_autograd_0`) still holds the backward, and may let go of it last. It needs the interpreter's
lock for that. Where the interpreter ends while it waits for the lock, Python up to 3.13 ends the
thread, in C++ code that cannot be left so, and the process aborts. See docs/pytorch.md.
"""

from __future__ import annotations

import atexit
import glob
import time
from typing import Any

# Prefix of torch's names for its backward threads.
_NAME = "pt_autograd"
# How long the end of a program may wait for them (seconds), and between two looks.
_PATIENCE = 0.2
_PAUSE = 0.001
# So many looks in a row must find them asleep: a lock puts a thread to sleep for moments too.
_LOOKS = 2


def install(torch: Any) -> None:
    """Called by enable(), where torch is imported: its own functions for the end run later."""
    run = getattr(torch.autograd.graph, "_engine_run_backward", None)
    if "_stash_obj_in_tls" in getattr(getattr(run, "__code__", None), "co_names", ()):
        atexit.register(wait)


def wait(patience: float = _PATIENCE) -> bool:
    """Waits until torch's threads of a backward sleep, for `patience` seconds at most, and without
    the interpreter's lock, which they may need. Whether they sleep."""
    end = time.monotonic() + patience
    asleep = 0
    threads = _threads()
    while threads:
        asleep = 0 if any(map(_is_running, threads)) else asleep + 1
        if asleep >= _LOOKS:
            return True
        if time.monotonic() >= end:
            return False
        time.sleep(_PAUSE)
    return True


def _threads() -> list[str]:
    """The folders in /proc of this process's threads of a backward."""
    folders = glob.glob("/proc/self/task/*")
    return [folder for folder in folders if _read(f"{folder}/comm").startswith(_NAME)]


def _is_running(folder: str) -> bool:
    """Whether the thread runs, or would if it had a core. One that has ended does not."""
    # The state follows the name, which may contain anything and ends with the last parenthesis.
    return _read(f"{folder}/stat").rpartition(")")[2].split()[:1] == ["R"]


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
