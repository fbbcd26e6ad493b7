"""What the library says of itself, and what it is told beside requests: numbers, trimming,
alerts."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import traceback
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Callable, Optional, TypeVar

from . import _library
from ._errors import GruyereError


@dataclass(frozen=True)
class Stats:
    """Numbers of one device, in bytes where not said otherwise."""

    total_memory: int
    """Physical memory of the device."""
    limit: int
    """The ceiling on what may be held."""
    reserved: int
    """Physical memory held."""
    reserved_peak: int
    live: int
    """Live blocks, each rounded up to 512 bytes."""
    live_peak: int
    pending: int
    """Freed by the program, waiting for streams."""
    arena_free: int
    """Free runs between blocks."""
    largest_free: int
    """The largest of them."""
    slab_bytes: int
    slab_free: int
    """Free slots of slabs."""
    captured: int
    """Held for CUDA graphs."""
    retries: int
    """Times that memory had to be reclaimed for a request."""
    out_of_memories: int
    """Out-of-memory answers."""
    bad_frees: int
    """Frees of what was no live block, on all devices."""
    events_recorded: int
    events_queried: int
    requested: int
    """Live blocks as they were asked for."""
    largest_request: int
    """The largest request that what is held could satisfy."""
    largest_request_growing: int
    """The largest request that could be satisfied if the ceiling is reached for it."""
    request_p99: int
    """The size that 99 of 100 requests so far do not exceed."""
    low_phase_trims: int
    """Times that a low-memory phase gave memory back."""
    low_phase_bytes: int
    """The memory that went back so."""
    fragmentation: float
    """The share of what is held that is free and cannot serve: lost / held."""
    external_fragmentation: float
    """1 - largest request / free memory held."""
    internal_fragmentation: float
    """1 - requested / live."""
    lost: int
    """Free between live blocks."""
    idle: int
    """Whole free pages."""
    typical_request: int
    """0 where pages move. Else the request by which `lost` is told: what it does not fit into."""
    unused: float
    """The share of what is held that is not live, torch's 1 - allocated / reserved."""


class _Stats(ctypes.Structure):
    # GruyereStats; later versions add fields at the end, and write no more than fits.
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
    library = _library.library()
    library.gruyere_stats.argtypes = [ctypes.c_int, ctypes.POINTER(_Stats)]
    library.gruyere_stats.restype = ctypes.c_int
    library.gruyere_next_alert.argtypes = [ctypes.POINTER(_Alert), ctypes.c_uint32]
    library.gruyere_next_alert.restype = ctypes.c_int
    library.gruyere_alert_threshold.argtypes = [ctypes.c_uint64, ctypes.c_char_p, ctypes.c_size_t]
    library.gruyere_alert_threshold.restype = ctypes.c_int
    return library


def current_device() -> int:
    import torch

    return int(torch.cuda.current_device())


def device_number(device: Any) -> int:
    """The number of a device as torch's functions take one: None for the current, a number,
    "cuda:1", a torch.device."""
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
    """Numbers of `device` (None: the current one). Raises GruyereError where there is no such
    device, or no CUDA."""
    number = device_number(device)
    raw = _Stats(size=ctypes.sizeof(_Stats))
    if _declared().gruyere_stats(number, ctypes.byref(raw)) != 0:
        raise GruyereError(
            f"stats({device!r}): there is no device {number} that Gruyère can use; "
            "gruyere.disable_reason() may say why"
        )
    return Stats(*(getattr(raw, field.name) for field in fields(Stats)))


def trim() -> int:
    """Gives back to the devices what nobody uses, as torch.cuda.empty_cache() does; the bytes that
    they got."""
    return int(_library.library().gruyere_trim())


@dataclass(frozen=True)
class Alert:
    """Memory was short, or a threshold of `alert:` is passed. Bytes where not said otherwise."""

    kind: str
    """"out_of_memory": a request was refused; "reclaim": one fitted nowhere, and memory was
    reclaimed for it; "threshold": one of `alert:` with the action `callback` is passed."""
    device: int
    asked: int
    """What was asked for; 0 of a threshold."""
    reserved: int
    """Held then."""
    live: int
    """Live then."""
    live_peak: int
    count: int
    """How many of this kind (of a threshold: of this one) there were on the device."""
    lost: int
    """Alerts that came too fast to be delivered, before this one."""
    threshold: Optional[str] = None
    """Of a threshold: its text, as `oom-in<10min`."""
    value: Optional[float] = None
    """Of a threshold: the value of its metric: bytes, bytes a second, seconds, a count, or a share
    from 0 to 1."""


_THRESHOLD = 3
_KINDS = {1: "out_of_memory", 2: "reclaim", _THRESHOLD: "threshold"}
_INTEGERS = ("device", "asked", "reserved", "live", "live_peak", "count", "lost")
_Listener = TypeVar("_Listener", bound=Callable[[Alert], object])
_listeners: list[Callable[[Alert], object]] = []
_thread: Optional[threading.Thread] = None
_lock = threading.Lock()
# How long the thread waits in the library at a time: the end of a process waits for no alert, but
# for this.
_BREATH_MILLISECONDS = 500


def on_alert(function: _Listener) -> _Listener:
    """Has `function` called with an Alert whenever memory is short or a threshold of `alert:` is
    passed; it may decorate one. It runs on a thread of Gruyère's own, a moment after: the thread
    that allocates must not wait for Python. What it raises is printed, and it is called again the
    next time."""
    if not callable(function):
        raise GruyereError(f"on_alert({function!r}): give it a function that takes an Alert")
    global _thread
    with _lock:
        if function not in _listeners:
            _listeners.append(function)
        if _thread is None:
            # Alerts are kept from here on.
            _deliver(0)
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
    """Takes one alert and hands it on. False: none will come in this process."""
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
                print(f"gruyere: {function!r}, which listens to alerts, failed:", file=sys.stderr)
                traceback.print_exc()
    return True


def _in_child() -> None:
    """A forked child has not this thread, and no CUDA that could be short."""
    global _thread, _lock
    _thread, _lock = None, threading.Lock()
    _listeners.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
