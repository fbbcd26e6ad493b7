"""torch's memory functions with Gruyère's numbers.

For an allocator that is not its own, torch raises an error or returns 0 when a program asks about
memory. `install()` replaces the functions that torch looks up at each call. All numbers, peaks and
resets come from the library; nothing is counted here.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from typing import Any

from .._native import library
from . import history, snapshot

_POOLS = ("all", "small_pool", "large_pool")
_NUMBERS = (
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
)
_COUNTS = (
    "num_alloc_retries",
    "num_ooms",
    "num_sync_all_streams",
    "num_device_alloc",
    "num_device_free",
)
# GruyereTorchStats, version 1: size and version, a GruyereStat by number and pool, the counts,
# limit and total memory. Training loops read it at every step, so it is unpacked at once, not field
# by field.
_STATS = struct.Struct(f"=2I{len(_NUMBERS) * len(_POOLS) * 4 + len(_COUNTS) + 2}Q")


class _PoolId(tuple[int, int]):
    """A capture pool's id as a key of the statistics. Newer versions of torch flatten such a key to
    "0_1"; older ones append it to a string."""

    def __radd__(self, prefix: str) -> str:
        return prefix + "_".join(map(str, self))


def install() -> None:
    """Replace torch's functions. Gruyère must be torch's allocator. A second call has no effect."""
    import torch

    patches = {
        "_cuda_memoryStats": memory_stats,
        "_cuda_resetPeakMemoryStats": reset_peak_memory_stats,
        "_cuda_resetAccumulatedMemoryStats": reset_accumulated_memory_stats,
        "_cuda_getMemoryFraction": memory_fraction,
        "_cuda_setMemoryFraction": set_memory_fraction,
        "_cuda_memorySnapshot": memory_snapshot,
        "_cuda_record_memory_history": history.record,
        "_cuda_record_memory_history_legacy": history.record_legacy,
        "_cuda_isHistoryEnabled": history.is_enabled,
        "_cuda_attach_out_of_memory_observer": history.attach_out_of_memory_observer,
        # torch.accelerator, from 2.9 on.
        "_accelerator_isAllocatorInitialized": torch.cuda.is_initialized,
        "_accelerator_getDeviceStats": memory_stats,
        "_accelerator_resetPeakStats": reset_peak_memory_stats,
        "_accelerator_resetAccumulatedStats": reset_accumulated_memory_stats,
        "_accelerator_emptyCache": torch._C._cuda_emptyCache,
    }
    for name, function in patches.items():
        if hasattr(torch._C, name):
            setattr(torch._C, name, function)


def memory_stats(device: int) -> dict[str, Any]:
    """torch's nested dictionary of statistics, with the keys of all versions so far."""
    stats = _stats(device)
    answer: dict[str, Any] = dict(zip(_COUNTS, stats[-len(_COUNTS) - 2 :]))
    at = 2
    for name in _NUMBERS:
        pools = answer[name] = {}
        for pool in _POOLS:
            pools[pool] = _dictionary(stats[at : at + 4])
            at += 4
    # Blocks of any size may be split, and no request is refused without a try.
    answer["max_split_size"] = -1
    answer["num_oom_rejections"] = 0
    answer["oversize_allocations"] = _dictionary((0, 0, 0, 0))
    answer["oversize_segments"] = _dictionary((0, 0, 0, 0))
    answer["reserved_bytes_by_private_pools"] = {
        _PoolId(id): _of_pool(held) for id, held in snapshot.capture_pools(device).items()
    }
    return answer


def reset_peak_memory_stats(device: int) -> None:
    """Reset the peaks to the current values."""
    _check(library.load().gruyere_reset_peaks(ctypes.c_int(device)), device)


def reset_accumulated_memory_stats(device: int) -> None:
    """Reset `allocated`, `freed` and the counts of events to 0."""
    _check(library.load().gruyere_reset_accumulated(ctypes.c_int(device)), device)


def memory_fraction(device: int) -> float:
    """The share of the device's memory that may be held: the fraction that was set, or less if
    `limit:` is lower."""
    limit, total_memory = _stats(device)[-2:]
    return limit / total_memory


def set_memory_fraction(fraction: float, device: int) -> None:
    """Limit the share of the device's memory that may be held. Checks the bounds here: in torch its
    own allocator does that, and the hook of a pluggable one cannot report an error."""
    memory_fraction(device)
    # As in torch, NaN is out of range too.
    if not 0 <= fraction <= 1:
        raise RuntimeError(f"invalid fraction:{fraction:g}. Please set within [0, 1].")
    library.load().gruyere_memory_fraction(ctypes.c_double(fraction), ctypes.c_int(device))


def memory_snapshot(argument: Any = None) -> dict[str, Any]:
    """torch's snapshot, of everything or of one pool. The argument is None or a pool's id,
    optionally followed by a third number that is 0 to leave out the traces."""
    import torch

    pool = tuple(argument[:2]) if argument is not None else (0, 0)
    traces = argument is None or len(argument) < 3 or bool(argument[2])
    # Counting devices before CUDA is in use would prevent children from being forked.
    devices = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    kept = history.collect(devices)
    return {
        "segments": [
            segment
            for device in range(devices)
            for segment in snapshot.segments(
                device, kept.frames_of(device), pool if any(pool) else None
            )
        ],
        "device_traces": kept.traces if traces else [[] for _ in range(devices)],
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
            "max_split_size": -1,
            "garbage_collection_threshold": 0.0,
            "expandable_segments": False,
            "GRUYERE_CONF": os.environ.get("GRUYERE_CONF", ""),
            "gruyere": library.load().gruyere_version().decode(),
        },
        "external_annotations": [],
    }


def _stats(device: int) -> tuple[int, ...]:
    """The values of GruyereTorchStats."""
    written = ctypes.create_string_buffer(_STATS.size.to_bytes(4, sys.byteorder), _STATS.size)
    _check(library.load().gruyere_torch_stats(ctypes.c_int(device), written), device)
    return _STATS.unpack_from(written)


def _dictionary(stat: tuple[int, ...]) -> dict[str, int]:
    current, peak, allocated, freed = stat
    return {"current": current, "peak": peak, "allocated": allocated, "freed": freed}


def _of_pool(held: tuple[int, int]) -> dict[str, dict[str, int]]:
    """The statistics of a capture pool. It only grows until it is released as a whole, so what it
    holds is also its peak."""
    whole, small = held
    amounts = zip(_POOLS, (whole, small, whole - small))
    return {
        pool: {"current": held, "peak": held, "allocated": held, "freed": 0}
        for pool, held in amounts
    }


def _check(code: int, device: int) -> None:
    if code == -2:
        raise RuntimeError(f"Invalid device argument {device}: this process has no such device")
    if code != 0:
        raise RuntimeError(
            "Gruyère cannot work in this process (it was forked from one that uses CUDA, or "
            "the log says why): use the spawn method"
        )
