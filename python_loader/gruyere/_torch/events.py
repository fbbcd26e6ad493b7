"""Telling the library which stream the program makes wait for which.

After such a wait, what the other stream had freed before its event may serve the waiting stream at
once (crates/heap/src/callers/program_waits.rs). Ranks of a job gain by it: the library adds no
waits of its own there. In a process that is alone it adds them, and learns by the program's how far
behind a stream is.

The waits of `torch.cuda.Stream` go through `torch.cuda.Event.record` and `torch.cuda.Event.wait`.
What else makes streams wait (autograd and NCCL's process groups in C++, `torch.Event`) is not seen,
which costs memory at most. An event that may be recorded without being seen is not followed: one
that graphs record at each replay (`external`), one that is shared with other processes, and one
whose handle the program has asked for.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any, Callable, Optional

from .._native import library

# Reentrant for signal handlers.
_lock = threading.RLock()
_installed = False
# The attribute of an event with its `_Recorded`.
_NAME = "_gruyere_recorded"


class _Recorded:
    """What an event stands behind."""

    __slots__ = ("mark", "under_way", "clash")

    def __init__(self) -> None:
        # Of the last record; 0 if that is not known. Equal ones are of one stream and moment.
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

    def give_up(self) -> None:
        with _lock:
            self.mark = 0
            # As if a call were never to end.
            self.under_way += 1
            self.clash = True

    def end(self, mark: int) -> None:
        with _lock:
            if not self.clash:
                self.mark = mark
            self.under_way -= 1
            if self.under_way == 0:
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
            *external: Any,
            **named: Any,
        ) -> Any:
            made = make(cls, enable_timing, blocking, interprocess, *external, **named)
            # A new torch may have other kinds of events.
            if not (interprocess or external or named):
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
            done = 0
            recorded.begin()
            try:
                handle = getattr(stream, "cuda_stream", None)
                mark = 0 if handle is None else mark_work(stream.device_index, handle)
                record(self, stream)
                done = mark
            finally:
                recorded.end(done)

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

    def given_out(name: str) -> property:
        handle = getattr(base, name)

        def get(self: Any) -> int:
            # Whoever has the handle may record the event.
            recorded = self.__dict__.pop(_NAME, None)
            if recorded is not None:
                recorded.give_up()
            return handle.__get__(self)

        return property(get)

    event.__new__ = new(event.__new__)  # type: ignore[method-assign, assignment]
    event.record = record(event.record)  # type: ignore[method-assign, assignment]
    event.wait = wait(event.wait)  # type: ignore[method-assign, assignment]
    for name in ("cuda_event", "event_id"):
        if hasattr(base, name):
            setattr(event, name, given_out(name))
