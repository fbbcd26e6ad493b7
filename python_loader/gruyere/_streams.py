"""Tells the library which streams last: those of torch's pools.

torch makes 32 streams a priority for a device when the first one is asked for, deals them out in
turn, and never destroys any (c10/cuda/CUDAStream.cpp leaves them to the end of the process on
purpose). So the library may record events on them at any time, where of other streams it may only
while a call names them: `torch.cuda.ExternalStream`, and what C++ code makes for itself, may be
destroyed without a word.

A stream is known to be a pool's by how it is made: `torch.cuda.Stream()`, with neither an id nor a
pointer that somebody else has. The first one on a device tells of its whole pool. Pool streams of a
program that makes them in C++ only are not told of; they are served all the same, as streams that
may end.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any, Callable

from . import _library

_lock = threading.Lock()
_installed = False
# Devices with announced pools.
_told: set[int] = set()
# More than any pool has: a series that never repeats its first stream is no pool.
_MOST = 1024


def install() -> None:
    """Puts the hook in place, once. Called by enable()."""
    global _installed
    import torch

    with _lock:
        if _installed or not hasattr(torch.cuda.Stream, "priority_range"):
            return
        _installed = True
    function = _library.library().gruyere_stream_lasts
    function.argtypes = [ctypes.c_int, ctypes.c_void_p]
    function.restype = ctypes.c_int
    watching = _watching(torch, torch.cuda.Stream.__new__)
    torch.cuda.Stream.__new__ = watching  # type: ignore[method-assign, assignment]


def _watching(torch: Any, make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def new(cls: type, *arguments: Any, **named: Any) -> Any:
        stream = make(cls, *arguments, **named)
        # Another's name, an id or a pointer, may be of any stream.
        if not set(named) - {"device", "priority"}:
            _tell(torch, stream.device.index, make)
        return stream

    return new


def _tell(torch: Any, device: int, make: Callable[..., Any]) -> None:
    if device in _told:
        return
    with _lock:
        if device in _told:
            return
        _told.add(device)
    least, greatest = torch.cuda.Stream.priority_range()
    for priority in range(greatest, least + 1):
        for handle in _pool(functools.partial(make, torch.cuda.Stream, device, priority)):
            _library.library().gruyere_stream_lasts(device, handle)


def _pool(next_stream: Callable[[], Any]) -> list[int]:
    """The handles of a pool, by going round it twice: afterwards the next stream is the one that it
    was before."""
    found: list[int] = []
    for _ in range(_MOST):
        handle = next_stream().cuda_stream
        if handle in found:
            break
        found.append(handle)
    else:
        return []
    # One stream of the second round has been taken.
    for _ in range(len(found) - 1):
        next_stream()
    return found
