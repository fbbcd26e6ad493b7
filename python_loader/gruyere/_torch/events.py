"""Telling the library which stream the program makes wait for which.

After such a wait, what the other stream had freed before its event may serve the waiting stream at
once (crates/heap/src/callers/program_waits.rs). Ranks of a job gain by it: the library adds no
waits of its own there.

In torch's Python interface every wait goes through `torch.cuda.Event.record` and
`torch.cuda.Event.wait`, those of `torch.cuda.Stream` too. What C++ code makes streams wait for
(autograd, NCCL's process groups) is not seen, which costs memory at most. An event that others may
record without being seen is not followed: one that is shared with other processes, and one whose
handle the program has asked for.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any, Callable, Optional

from .._native import library

_lock = threading.Lock()
_installed = False
# The attribute of an event with its `_Recorded`.
_NAME = "_gruyere_recorded"


class _Recorded:
    """What an event stands behind."""

    __slots__ = ("mark", "under_way", "clash")

    def __init__(self) -> None:
        # Of the last record; 0 if that is not known. No two are equal.
        self.mark = 0
        # Calls that record the event now, and whether two of them have met: which was last is then
        # not known.
        self.under_way = 0
        self.clash = False

    def begin(self) -> None:
        with _lock:
            self.clash = self.clash or self.under_way > 0
            self.under_way += 1
            self.mark = 0

    def end(self, mark: int) -> None:
        with _lock:
            self.under_way -= 1
            if not self.clash:
                self.mark = mark
            elif self.under_way == 0:
                self.clash = False


def install() -> None:
    """Install the hooks, once. Called by enable()."""
    global _installed
    import torch

    event, base = torch.cuda.Event, torch._C._CudaEventBase
    known = ("__new__", "record", "wait")
    with _lock:
        if _installed or not all(name in vars(event) for name in known):
            return
        _installed = True
    loaded = library.load()
    mark_work, stream_waits = loaded.gruyere_mark_work, loaded.gruyere_stream_waits
    mark_work.argtypes = [ctypes.c_int, ctypes.c_void_p]
    mark_work.restype = ctypes.c_uint64
    stream_waits.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64]
    stream_waits.restype = None
    current_stream = torch.cuda.current_stream

    def new(make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def new(
            cls: type,
            enable_timing: bool = False,
            blocking: bool = False,
            interprocess: bool = False,
            *arguments: Any,
            **named: Any,
        ) -> Any:
            made = make(cls, enable_timing, blocking, interprocess, *arguments, **named)
            if not interprocess:
                setattr(made, _NAME, _Recorded())
            return made

        return new

    def record(record: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(record)
        def marked(self: Any, stream: Optional[Any] = None) -> None:
            recorded = self.__dict__.get(_NAME)
            if recorded is None:
                return record(self, stream)
            if stream is None:
                stream = current_stream()
            recorded.begin()
            mark = 0
            try:
                handle = getattr(stream, "cuda_stream", None)
                mark = 0 if handle is None else mark_work(stream.device_index, handle)
                record(self, stream)
            except BaseException:
                mark = 0
                raise
            finally:
                recorded.end(mark)

        return marked

    def wait(wait: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(wait)
        def told(self: Any, stream: Optional[Any] = None) -> None:
            recorded = self.__dict__.get(_NAME)
            mark = 0 if recorded is None else recorded.mark
            if mark == 0:
                return wait(self, stream)
            if stream is None:
                stream = current_stream()
            wait(self, stream)
            handle = getattr(stream, "cuda_stream", None)
            # Otherwise the event was recorded again meanwhile.
            if recorded.mark == mark and handle is not None:
                stream_waits(stream.device_index, handle, mark)

        return told

    def cuda_event(self: Any) -> int:
        # Whoever has the handle may record the event.
        self.__dict__.pop(_NAME, None)
        return base.cuda_event.__get__(self)

    event.__new__ = new(event.__new__)  # type: ignore[method-assign, assignment]
    event.record = record(event.record)  # type: ignore[method-assign, assignment]
    event.wait = wait(event.wait)  # type: ignore[method-assign, assignment]
    event.cuda_event = property(cuda_event)  # type: ignore[assignment, misc]
