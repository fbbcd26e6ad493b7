"""Statistics, trimming and alerts: the library's calls besides allocation."""

from __future__ import annotations

import ctypes
import os
import threading
import traceback
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Callable, Optional, TypeVar

from ._errors import GruyereError, say
from ._native import library


@dataclass(frozen=True)
class Stats:
    """Statistics of one device, in bytes unless stated otherwise."""

    total_memory: int
    """Physical memory of the device."""
    limit: int
    """The ceiling on the memory held."""
    reserved: int
    """Physical memory held."""
    reserved_peak: int
    live: int
    """Live blocks, each rounded up to 512 bytes."""
    live_peak: int
    pending: int
    """Blocks that the program has freed and streams may still use."""
    arena_free: int
    """Free runs between blocks."""
    largest_free: int
    """The largest free run."""
    slab_bytes: int
    slab_free: int
    """Free slots of slabs."""
    captured: int
    """Memory held for CUDA graphs."""
    retries: int
    """Number of requests for which memory had to be reclaimed."""
    out_of_memories: int
    """Number of requests refused for lack of memory."""
    bad_frees: int
    """Number of frees of an address that is no live block, on all devices."""
    events_recorded: int
    events_queried: int
    requested: int
    """Live blocks in the sizes that the program requested."""
    largest_request: int
    """The largest request that the memory held could satisfy."""
    largest_request_growing: int
    """The largest request that could be satisfied by growing up to the ceiling."""
    request_p99: int
    """The size that 99 of 100 requests so far do not exceed."""
    low_phase_trims: int
    """Number of times that memory was released in a phase of low memory."""
    low_phase_bytes: int
    """Memory released in phases of low memory."""
    fragmentation: float
    """Share of the memory held that is free and unusable: lost / held."""
    external_fragmentation: float
    """1 - largest request / free memory held."""
    internal_fragmentation: float
    """1 - requested / live."""
    lost: int
    """Free memory between live blocks."""
    idle: int
    """Whole free pages."""
    typical_request: int
    """0 if pages move. Otherwise the request size behind `lost`: free memory that it does not fit
    into is lost."""
    unused: float
    """Share of the memory held that is not live; torch's 1 - allocated / reserved."""


class _Stats(ctypes.Structure):
    # GruyereStats; later versions add fields at the end and write no more than fits.
    _fields_ = [
        ("size", ctypes.c_uint32),
        ("version", ctypes.c_uint32),
        *(
            (field.name, ctypes.c_double if field.type in (float, "float") else ctypes.c_uint64)
            for field in fields(Stats)
        ),
    ]


class _Alert(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_uint32),
        ("device", ctypes.c_uint32),
        *(
            (name, ctypes.c_uint64)
            for name in ("asked", "reserved", "live", "live_peak", "count", "lost")
        ),
        ("value", ctypes.c_double),
        ("threshold", ctypes.c_uint64),
    ]


@lru_cache(maxsize=None)
def _declared() -> ctypes.CDLL:
    lib = library.load()
    lib.gruyere_stats.argtypes = [ctypes.c_int, ctypes.POINTER(_Stats)]
    lib.gruyere_stats.restype = ctypes.c_int
    lib.gruyere_next_alert.argtypes = [ctypes.POINTER(_Alert), ctypes.c_uint32]
    lib.gruyere_next_alert.restype = ctypes.c_int
    lib.gruyere_alert_threshold.argtypes = [ctypes.c_uint64, ctypes.c_char_p, ctypes.c_size_t]
    lib.gruyere_alert_threshold.restype = ctypes.c_int
    return lib


def current_device() -> int:
    import torch

    return int(torch.cuda.current_device())


def device_number(device: Any) -> int:
    """The number of a device given as for torch's functions: None (the current device), a number,
    "cuda:1" or a torch.device."""
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    import torch

    found = torch.device(device)
    if found.type != "cuda":
        raise GruyereError(f"device={device!r}: not a CUDA device")
    return current_device() if found.index is None else found.index


def stats(device: Any = None) -> Stats:
    """Return the statistics of `device` (None: the current one).

    Raises GruyereError if there is no such device, or no CUDA.
    """
    number = device_number(device)
    raw = _Stats(size=ctypes.sizeof(_Stats))
    if _declared().gruyere_stats(number, ctypes.byref(raw)) != 0:
        raise GruyereError(
            f"stats({device!r}): Gruyère has no device {number}; gruyere.disable_reason() may say "
            "why"
        )
    return Stats(*(getattr(raw, field.name) for field in fields(Stats)))


def trim() -> int:
    """Release unused memory to all devices, as torch.cuda.empty_cache() does. Returns the number of
    bytes released."""
    return int(library.load().gruyere_trim())


@dataclass(frozen=True)
class Alert:
    """An event of low memory, or a threshold of `alert:` that is passed. Sizes are in bytes."""

    kind: str
    """"out_of_memory": a request was refused; "reclaim": a request fitted nowhere, and memory was
    reclaimed for it; "threshold": a threshold of `alert:` with the action `callback` is passed."""
    device: int
    asked: int
    """The size of the request; 0 for a threshold."""
    reserved: int
    """Memory held at that time."""
    live: int
    """Live memory at that time."""
    live_peak: int
    count: int
    """Number of alerts of this kind (for a threshold: of this threshold) on the device so far."""
    lost: int
    """Number of alerts before this one that came too fast to be delivered."""
    threshold: Optional[str] = None
    """The text of the threshold, such as `oom-in<10min`; None for other kinds."""
    value: Optional[float] = None
    """The value of the threshold's metric: bytes, bytes per second, seconds, a count, or a share
    from 0 to 1; None for other kinds."""


_THRESHOLD = 3
_KINDS = {1: "out_of_memory", 2: "reclaim", _THRESHOLD: "threshold"}
_INTEGERS = ("device", "asked", "reserved", "live", "live_peak", "count", "lost")
_Listener = TypeVar("_Listener", bound=Callable[[Alert], object])
_listeners: list[Callable[[Alert], object]] = []
_thread: Optional[threading.Thread] = None
_lock = threading.Lock()
# How long one wait of the thread in the library lasts. The end of the process may have to wait for
# it.
_BREATH_MILLISECONDS = 500


def on_alert(function: _Listener) -> _Listener:
    """Call `function` with an Alert whenever memory is short or a threshold of `alert:` is passed.
    Can be used as a decorator.

    `function` runs on a thread of Gruyère, shortly after the event: the allocating thread must not
    wait for Python. If it raises an exception, the exception is printed, and later alerts still
    call it.
    """
    if not callable(function):
        raise GruyereError(f"on_alert({function!r}): expected a function that takes an Alert")
    global _thread
    if _thread is None:
        # The library keeps alerts from the first call on. Without the lock: a listener may be
        # called, and may call this function.
        _deliver(0)
    with _lock:
        if function not in _listeners:
            _listeners.append(function)
        if _thread is None:
            _thread = threading.Thread(target=_listen, name="gruyere-alerts", daemon=True)
            _thread.start()
    return function


def _listen() -> None:
    while _deliver(_BREATH_MILLISECONDS):
        pass


def _threshold(number: int) -> Optional[str]:
    """The text of a threshold of `alert:`."""
    text = ctypes.create_string_buffer(256)
    found = _declared().gruyere_alert_threshold(number, text, len(text))
    return text.value.decode() if found >= 0 else None


def _deliver(milliseconds: int) -> bool:
    """Take one alert from the library and pass it to the listeners. Returns False if this process
    will never have any."""
    raw = _Alert()
    found = _declared().gruyere_next_alert(ctypes.byref(raw), milliseconds)
    if found < 0:
        return False
    if found == 1:
        numbers = {name: getattr(raw, name) for name in _INTEGERS}
        threshold, value = (
            (_threshold(raw.threshold), raw.value) if raw.kind == _THRESHOLD else (None, None)
        )
        alert = Alert(
            kind=_KINDS.get(raw.kind, str(raw.kind)), threshold=threshold, value=value, **numbers
        )
        for function in tuple(_listeners):
            try:
                function(alert)
            except Exception:
                failed = traceback.format_exc().rstrip("\n")
                say(f"gruyere: the alert listener {function!r} failed:\n{failed}")
    return True


def _in_child() -> None:
    """Reset in a forked child, which has neither this thread nor CUDA."""
    global _thread, _lock
    _thread, _lock = None, threading.Lock()
    _listeners.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
