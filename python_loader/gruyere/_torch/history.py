"""The allocation history behind `torch.cuda.memory._record_memory_history`: which blocks were
allocated and freed, when, and from where.

While the history is on, the library records every malloc and free. It never asks Python for a
stack: torch calls it with and without the GIL, and taking the GIL inside an allocation can
deadlock. Instead a torch function mode in this module sees each call of a torch function before it
runs, numbers the Python stack, and passes the number to the library for the calling thread. So:

- frames are known for what the thread that started the history does through torch's functions and
  operators. Frees between such calls have none, nor have blocks of other threads (including
  autograd's) and of extensions that allocate by themselves;
- there are no C++ frames, whatever `stacks` says;
- the stack ends at the call into torch: frames of torch's own Python code below it are left out;
- torch.compile traces through the mode and breaks its graphs at it: use `context=None` there.

With the history on, a call of a torch function costs some microseconds more, and a malloc or free
some hundred nanoseconds. With the history off, neither costs anything.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
from dataclasses import dataclass
from types import CodeType
from typing import Any, Callable, Optional

from .._native import library

_ACTIONS = (
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "oom",
    "segment_map",
    "segment_unmap",
)
_MOST = (1 << 63) - 1

Frames = list[dict[str, Any]]
Observer = Callable[[int, int, int, int], object]


class _Entry(ctypes.Structure):
    """GruyereHistoryEntry."""

    _fields_ = [
        ("action", ctypes.c_uint32),
        ("device", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("stream", ctypes.c_uint64),
        ("time", ctypes.c_uint64),
        ("context", ctypes.c_uint64),
        ("origin", ctypes.c_uint64),
    ]


class _Origin(ctypes.Structure):
    """GruyereOrigin."""

    _fields_ = [
        ("address", ctypes.c_uint64),
        ("context", ctypes.c_uint64),
        ("device", ctypes.c_uint32),
        ("room", ctypes.c_uint32),
    ]


class _Face(ctypes.Structure):
    """GruyereHistory, version 1."""

    _fields_ = [
        ("size", ctypes.c_uint32),
        ("version", ctypes.c_uint32),
        ("entry_size", ctypes.c_uint32),
        ("origin_size", ctypes.c_uint32),
        ("entries", ctypes.POINTER(_Entry)),
        ("entry_count", ctypes.c_uint64),
        ("origins", ctypes.POINTER(_Origin)),
        ("origin_count", ctypes.c_uint64),
        ("lost", ctypes.c_uint64),
    ]


class _OutOfMemory(ctypes.Structure):
    """GruyereOutOfMemory."""

    _fields_ = [
        ("device", ctypes.c_uint32),
        ("count", ctypes.c_uint32),
        ("asked", ctypes.c_uint64),
        ("reserved", ctypes.c_uint64),
        ("limit", ctypes.c_uint64),
        ("free", ctypes.c_uint64),
    ]


class _Stacks:
    """Python stacks, numbered from 1. No number is given twice: a thread may use one that was
    forgotten."""

    def __init__(self) -> None:
        self._next = itertools.count(1)
        # With the code objects whose ids are in the key: they must stay alive.
        self._numbers: dict[tuple[int, ...], tuple[int, tuple[CodeType, ...]]] = {}
        self._frames: dict[int, Frames] = {}

    def number(self, frame: Any) -> int:
        """The number of the stack whose innermost frame is `frame`."""
        key: list[int] = []
        at = frame
        while at is not None:
            key.append(id(at.f_code))
            key.append(at.f_lasti)
            at = at.f_back
        whole = tuple(key)
        known = self._numbers.get(whole)
        return known[0] if known is not None else self._add(whole, frame)

    def _add(self, key: tuple[int, ...], frame: Any) -> int:
        frames: Frames = []
        codes: list[CodeType] = []
        at = frame
        while at is not None:
            code = at.f_code
            codes.append(code)
            frames.append(
                {"name": code.co_name, "filename": code.co_filename, "line": at.f_lineno or 0}
            )
            at = at.f_back
        number = next(self._next)
        # In this order: if another thread calls `forget` meanwhile, no number lacks its frames.
        self._numbers[key] = number, tuple(codes)
        self._frames[number] = frames
        return number

    def frames(self, number: int) -> Frames:
        """The frames of a stack, innermost first; none for 0 and for unknown numbers."""
        return self._frames.get(number, [])

    def forget(self) -> None:
        """Drop all stacks."""
        self._frames.clear()
        self._numbers.clear()


@dataclass
class _On:
    """The options with which the history was started."""

    context: Optional[str]
    skipped: frozenset[str]
    mode: Any


@dataclass
class Collected:
    """The contents of the history, for a snapshot."""

    traces: list[list[dict[str, Any]]]
    origins: list[dict[int, Frames]]

    def frames_of(self, device: int) -> Callable[[int], Frames]:
        """A function that returns the frames in which the block at an address of `device` was
        allocated."""
        known = self.origins[device]
        return lambda address: known.get(address, [])


_stacks = _Stacks()
_on: Optional[_On] = None
_observers: list[Observer] = []
_seen_oom = (-1, 0)


def record(
    enabled: Optional[str] = "all",
    context: Optional[str] = "all",
    stacks: str = "all",
    max_entries: int = sys.maxsize,
    clear_history: bool = False,
    compile_context: bool = False,
    global_record_annotations: bool = False,
    skip_actions: Any = (),
    *_others: Any,
) -> None:
    """`torch._C._cuda_record_memory_history`."""
    global _on
    for name, value, choices in (
        ("enabled", enabled, (None, "state", "all")),
        ("context", context, (None, "state", "alloc", "all")),
        ("stacks", stacks, ("python", "all")),
    ):
        if value not in choices:
            raise RuntimeError(f"{name}={value!r}: expected one of {', '.join(map(repr, choices))}")
    if _on is not None:
        _leave(_on.mode)
        _on = None
    lib = library.load()
    if enabled is None:
        lib.gruyere_history_stop()
        _stacks.forget()
        return
    if clear_history:
        _stacks.forget()
    lib.gruyere_history_start.argtypes = [ctypes.c_uint64, ctypes.c_int]
    entries = min(max(int(max_entries), 0), _MOST) if enabled == "all" else 0
    if lib.gruyere_history_start(entries, int(clear_history)) != 0:
        raise RuntimeError(
            "Gruyère cannot work in this process (it was forked from one that uses CUDA, or "
            "the log says why)"
        )
    _on = _On(context, frozenset(skip_actions or ()), _enter() if context else None)


def record_legacy(
    enabled: bool,
    record_context: bool = True,
    trace_alloc_max_entries: int = 1,
    trace_alloc_record_context: bool = False,
    record_context_cpp: bool = False,
    clear_history: bool = False,
    compile_context: bool = False,
    global_record_annotations: bool = False,
    skip_actions: Any = (),
    *_others: Any,
) -> None:
    """`torch._C._cuda_record_memory_history_legacy`."""
    context = "alloc" if trace_alloc_record_context else "state" if record_context else None
    stacks = "all" if record_context_cpp else "python"
    record(
        "all" if enabled else None,
        context,
        stacks,
        trace_alloc_max_entries,
        clear_history,
        skip_actions=skip_actions,
    )


def is_enabled() -> bool:
    """`torch._C._cuda_isHistoryEnabled`."""
    return _on is not None


def collect(devices: int) -> Collected:
    """The current contents of the history for `devices` devices."""
    found = Collected([[] for _ in range(devices)], [{} for _ in range(devices)])
    if _on is None:
        return found
    lib = library.load()
    lib.gruyere_history.argtypes = []
    lib.gruyere_history.restype = ctypes.POINTER(_Face)
    lib.gruyere_history_free.argtypes = [ctypes.POINTER(_Face)]
    lib.gruyere_history_free.restype = None
    taken = lib.gruyere_history()
    if not taken:
        return found
    try:
        face = taken.contents
        assert (face.entry_size, face.origin_size) == (
            ctypes.sizeof(_Entry),
            ctypes.sizeof(_Origin),
        ), "another version of the library"
        for at in range(face.entry_count):
            entry = face.entries[at]
            action = _ACTIONS[entry.action]
            if action not in _on.skipped and entry.device < devices:
                found.traces[entry.device].append(_trace(entry, action, _on.context))
        for at in range(face.origin_count):
            origin = face.origins[at]
            if origin.context and origin.device < devices:
                found.origins[origin.device][origin.address] = _stacks.frames(origin.context)
    finally:
        lib.gruyere_history_free(taken)
    return found


def _trace(entry: _Entry, action: str, context: Optional[str]) -> dict[str, Any]:
    """An entry in torch's format."""
    wanted = context == "all" or (context == "alloc" and action in ("alloc", "oom"))
    return {
        "action": action,
        "device_free" if action == "oom" else "addr": entry.address,
        "size": entry.bytes,
        "stream": entry.stream,
        "time_us": entry.time,
        "compile_context": "N/A",
        "user_metadata": "",
        "frames": _stacks.frames(entry.context) if wanted else [],
    }


def _enter() -> Any:
    """Start numbering the stacks of this thread's calls of torch functions."""
    from torch.overrides import TorchFunctionMode

    lib = library.load()
    # The function neither waits nor calls back, so it may run with the GIL held.
    tell = ctypes.PYFUNCTYPE(ctypes.c_uint64, ctypes.c_uint64)(("gruyere_history_context", lib))
    number = _stacks.number

    class Stacks(TorchFunctionMode):  # type: ignore[misc]
        """Passes the number of the calling thread's stack to the library."""

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if _on is None:
                # Another thread has stopped the history.
                return func(*args, **(kwargs or {}))
            before = tell(number(sys._getframe(1)))
            try:
                return func(*args, **(kwargs or {}))
            finally:
                tell(before)

    mode = Stacks()
    mode.__enter__()
    return mode


def _leave(mode: Any) -> None:
    """Remove the mode from this thread's stack of modes, wherever it is in the stack."""
    if mode is None:
        return
    import torch.overrides as overrides

    above = []
    stack = overrides._get_current_function_mode_stack()
    if mode not in stack:
        # Another thread started the history. Its mode keeps numbering, without effect.
        return
    while True:
        top = overrides._pop_mode()
        if top is mode:
            break
        above.append(top)
    for other in reversed(above):
        overrides._push_mode(other)


def attach_out_of_memory_observer(observer: Observer) -> None:
    """`torch._C._cuda_attach_out_of_memory_observer`. The observer is called when torch creates the
    Python exception: before any handler of the program, and with the GIL held, as it must be."""
    import torch

    if not _observers:
        error: Any = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)
        error.__init__ = _init
    _observers.append(observer)


def _init(self: RuntimeError, *arguments: object) -> None:
    RuntimeError.__init__(self, *arguments)
    global _seen_oom
    latest = _latest_out_of_memory()
    if latest is None or (latest.device, latest.count) == _seen_oom:
        # An error that is not ours, or a copy of one.
        return
    _seen_oom = (latest.device, latest.count)
    for observer in _observers:
        observer(latest.device, latest.asked, latest.limit, latest.free)


def _latest_out_of_memory() -> Optional[_OutOfMemory]:
    latest = _OutOfMemory()
    function = library.load().gruyere_latest_out_of_memory
    function.argtypes = [ctypes.POINTER(_OutOfMemory), ctypes.c_size_t]
    function.restype = ctypes.c_size_t
    return latest if function(ctypes.byref(latest), ctypes.sizeof(_OutOfMemory)) else None
