"""Memory events for torch's profiler.

torch's own allocator checks at each malloc and free whether a profiler is active, and reports the
event to it. Here the package notifies the library when a profiler with `profile_memory` starts and
stops. Between the two, requests leave the library's hot path; at other times they cost nothing
more. A stand-in GPU that invents values hears of each request in this way: what was copied to a
block is unknown once another tensor has it.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import threading
import weakref
from typing import Any

from .. import _stand_in
from .._native import library

_lock = threading.Lock()
# Running profilers of all threads; one that is gone without its end counts no more.
_running: weakref.WeakSet[Any] = weakref.WeakSet()


def install() -> None:
    """Watch torch's profilers start and stop. All Python profilers go through these two classes."""
    for module in ("torch.autograd.profiler", "torch.autograd.profiler_legacy"):
        _watch(importlib.import_module(module).profile)
    if "PHANTOM_VALUES" in os.environ and _stand_in.is_device():
        _tell(install, True)


def _watch(profile: Any) -> None:
    start, stop = profile._start_trace, profile.__exit__

    @functools.wraps(start)
    def _start_trace(self: Any) -> Any:
        if self.profile_memory:
            _tell(self, True)
        try:
            return start(self)
        except BaseException:
            _tell(self, False)
            raise

    @functools.wraps(stop)
    def __exit__(self: Any, *arguments: Any) -> Any:
        try:
            return stop(self, *arguments)
        finally:
            _tell(self, False)

    profile._start_trace, profile.__exit__ = _start_trace, __exit__


def _tell(profile: Any, runs: bool) -> None:
    with _lock:
        before = bool(_running)
        (_running.add if runs else _running.discard)(profile)
        if bool(_running) != before:
            library.load().gruyere_tell_profiler(ctypes.c_int(runs))
