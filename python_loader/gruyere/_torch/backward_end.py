"""Waiting at exit for the threads of a backward.

torch 2.15 and newer keep a Python object (a copy of the caller's `contextvars`) with each backward.
Behind a backward, above all one that fails, the calling thread goes on while one of torch's threads
(`pt_autograd_0`) still holds the backward and may be the last to release it. That thread needs the
GIL to do so. If the
interpreter exits while the thread waits for the GIL, Python up to 3.13 ends the thread inside C++
code that does not allow it, and the process aborts. See docs/pytorch.md.
"""

from __future__ import annotations

import atexit
import glob
import time
from typing import Any

# Prefix of the names that torch gives its backward threads.
_NAME = "pt_autograd"
# How long the exit of a program may wait for them, and the pause between two checks (seconds).
_PATIENCE = 0.2
_PAUSE = 0.001
# The number of consecutive checks that must find them asleep: a lock also makes a thread sleep, for
# moments.
_LOOKS = 2


def install(torch: Any) -> None:
    """Register the exit handler, once. Call it after torch is imported: exit handlers run in
    reverse order, so torch's run later."""
    run = getattr(torch.autograd.graph, "_engine_run_backward", None)
    if "_stash_obj_in_tls" in getattr(getattr(run, "__code__", None), "co_names", ()):
        # Once, though a measured run and enable() both ask for it.
        atexit.unregister(wait)
        atexit.register(wait)


def wait(patience: float = _PATIENCE) -> bool:
    """Wait until torch's backward threads sleep, for at most `patience` seconds. Does not hold the
    GIL, which they may need. Returns whether they sleep."""
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
    """The /proc folders of this process's backward threads."""
    folders = glob.glob("/proc/self/task/*")
    return [folder for folder in folders if _read(f"{folder}/comm").startswith(_NAME)]


def _is_running(folder: str) -> bool:
    """Whether the thread is running or runnable. A thread that has ended is not."""
    # The state follows the name, which may contain anything and ends at the last parenthesis.
    return _read(f"{folder}/stat").rpartition(")")[2].split()[:1] == ["R"]


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
