"""Memory snapshots in torch's format, made from the library's own books. memory_viz and similar
tools can open them."""

from __future__ import annotations

import ctypes
from typing import Any, Callable, Optional

from .._native import library

_STATES = ("inactive", "active_allocated", "active_pending_free")


class _Segment(ctypes.Structure):
    """GruyereSegment."""

    _fields_ = [
        ("address", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("pool_first", ctypes.c_uint64),
        ("pool_second", ctypes.c_uint64),
        ("first_block", ctypes.c_uint64),
        ("block_count", ctypes.c_uint64),
        ("small", ctypes.c_uint32),
        ("stitched", ctypes.c_uint32),
    ]


class _Block(ctypes.Structure):
    """GruyereBlock."""

    _fields_ = [
        ("address", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("requested", ctypes.c_uint64),
        ("stream", ctypes.c_uint64),
        ("state", ctypes.c_uint32),
        ("room", ctypes.c_uint32),
    ]


class _Pool(ctypes.Structure):
    """GruyerePool."""

    _fields_ = [
        ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("small", ctypes.c_uint64),
    ]


class _Snapshot(ctypes.Structure):
    """GruyereSnapshot, version 1."""

    _fields_ = [
        ("size", ctypes.c_uint32),
        ("version", ctypes.c_uint32),
        ("segment_size", ctypes.c_uint32),
        ("block_size", ctypes.c_uint32),
        ("segments", ctypes.POINTER(_Segment)),
        ("segment_count", ctypes.c_uint64),
        ("blocks", ctypes.POINTER(_Block)),
        ("block_count", ctypes.c_uint64),
        ("pools", ctypes.POINTER(_Pool)),
        ("pool_count", ctypes.c_uint64),
        ("unmapped", ctypes.c_uint64),
    ]


Frames = list[dict[str, Any]]


def segments(
    device: int, frames_of: Callable[[int], Frames], pool: Optional[tuple[int, int]] = None
) -> list[dict[str, Any]]:
    """The segments of `device`, or only those of the capture pool `pool`. `frames_of(address)`
    returns the frames in which the block at an address was allocated."""
    taken = _take(device)
    if not taken:
        return []
    try:
        face = taken.contents
        found = (face.segments[at] for at in range(face.segment_count))
        wanted = [
            segment
            for segment in found
            if pool is None or (segment.pool_first, segment.pool_second) == pool
        ]
        return [_segment(device, face, segment, frames_of) for segment in wanted]
    finally:
        library.load().gruyere_snapshot_free(taken)


def capture_pools(device: int) -> dict[tuple[int, int], tuple[int, int]]:
    """For each capture pool of `device`, the bytes that it holds, and how many of them are for
    small blocks."""
    room, count = 16, ctypes.c_uint32()
    while True:
        pools = (_Pool * room)()
        code = library.load().gruyere_capture_pools(
            ctypes.c_int(device), pools, ctypes.c_uint32(room), ctypes.byref(count)
        )
        if code != 0:
            return {}
        if count.value <= room:
            return {
                (pool.first, pool.second): (pool.bytes, pool.small) for pool in pools[: count.value]
            }
        room = count.value


def _take(device: int) -> Any:
    lib = library.load()
    lib.gruyere_snapshot.argtypes = [ctypes.c_int]
    lib.gruyere_snapshot.restype = ctypes.POINTER(_Snapshot)
    lib.gruyere_snapshot_free.argtypes = [ctypes.POINTER(_Snapshot)]
    lib.gruyere_snapshot_free.restype = None
    taken = lib.gruyere_snapshot(device)
    if taken:
        face = taken.contents
        assert (face.segment_size, face.block_size) == (
            ctypes.sizeof(_Segment),
            ctypes.sizeof(_Block),
        ), "another version of the library"
    return taken


def _segment(
    device: int, face: _Snapshot, segment: _Segment, frames_of: Callable[[int], Frames]
) -> dict[str, Any]:
    blocks = [
        face.blocks[at]
        for at in range(segment.first_block, segment.first_block + segment.block_count)
    ]
    active = [block for block in blocks if block.state]
    # Gruyère's memory belongs to no stream. A span whose blocks all belong to one stream is
    # reported with that stream. Rows of pages are reported with stream 0, as in the history, where
    # viewers join the parts of a row that grew only if they have the same stream.
    streams = set() if segment.stitched else {block.stream for block in active}
    return {
        "device": device,
        "address": segment.address,
        "total_size": segment.bytes,
        "allocated_size": sum(block.bytes for block in active if block.state == 1),
        "active_size": sum(block.bytes for block in active),
        "requested_size": sum(block.requested for block in active),
        "stream": streams.pop() if len(streams) == 1 else 0,
        "segment_type": "small" if segment.small else "large",
        "segment_pool_id": (segment.pool_first, segment.pool_second),
        "is_expandable": bool(segment.stitched),
        "frames": [],
        "blocks": [
            {
                "address": block.address,
                "size": block.bytes,
                "requested_size": block.requested,
                "state": _STATES[block.state],
                "frames": frames_of(block.address) if block.state else [],
            }
            for block in blocks
        ],
    }
