"""Announcing lasting streams to the library: those of torch's stream pools.

torch creates 32 streams per priority for each device when the first one is requested, hands them
out in turn and never destroys any (c10/cuda/CUDAStream.cpp deliberately leaves them to the end of
the process). So the library may record events on them at any time. On other streams it may do so
only during a call that names them, because they may be destroyed without notice:
`torch.cuda.ExternalStream`, and streams that C++ code creates.

A pool stream is recognised by its construction: `torch.cuda.Stream()` without an id or a pointer.
The first one on a device announces the device's whole pool. Pool streams that only C++ code
requests are not announced; the library serves them as streams that may end.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any, Callable

from .._native import library

_lock = threading.Lock()
_installed = False
# Devices with announced pools.
_told: set[int] = set()
# More streams than any pool has: if none repeats by then, they are not from a pool.
_MOST = 1024


def install() -> None:
    """Install the hook, once. Called by enable()."""
    global _installed
    import torch

    with _lock:
        if _installed or not hasattr(torch.cuda.Stream, "priority_range"):
            return
        _installed = True
    function = library.load().gruyere_stream_lasts
    function.argtypes = [ctypes.c_int, ctypes.c_void_p]
    function.restype = ctypes.c_int
    watching = _watching(torch, torch.cuda.Stream.__new__)
    torch.cuda.Stream.__new__ = watching  # type: ignore[method-assign, assignment]


def _watching(torch: Any, make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def new(cls: type, *arguments: Any, **named: Any) -> Any:
        stream = make(cls, *arguments, **named)
        # An id or a pointer may refer to any stream.
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
            library.load().gruyere_stream_lasts(device, handle)


def _pool(next_stream: Callable[[], Any]) -> list[int]:
    """The handles of a pool. Goes round it twice, so that the next stream afterwards is the same as
    before."""
    found: list[int] = []
    for _ in range(_MOST):
        handle = next_stream().cuda_stream
        if handle in found:
            break
        found.append(handle)
    else:
        return []
    # The loop above has taken the first stream of the second round.
    for _ in range(len(found) - 1):
        next_stream()
    return found
