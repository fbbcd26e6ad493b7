"""Named pools: memory that can be released to the device as a whole."""

from __future__ import annotations

import ctypes
import gc
from dataclasses import dataclass
from functools import lru_cache
from types import TracebackType
from typing import Any, Optional, Union

from . import _control, _enable
from ._errors import GruyereError
from ._native import library, sizes

_BUSY = -5
# The number of blocks that the error of a refused release lists.
_NAMED = 8


class _Stats(ctypes.Structure):
    # GruyerePoolStats; later versions add fields at the end.
    _fields_ = [
        ("size", ctypes.c_uint32),
        ("version", ctypes.c_uint32),
        *(
            (name, ctypes.c_uint64)
            for name in ("reserve", "limit", "held", "live", "live_blocks", "pending")
        ),
    ]


class _Block(ctypes.Structure):
    _fields_ = [
        ("address", ctypes.c_uint64),
        ("requested", ctypes.c_uint64),
        ("step", ctypes.c_int64),
    ]


@lru_cache(maxsize=None)
def _declared() -> ctypes.CDLL:
    lib = library.load()
    u64 = ctypes.c_uint64
    for name, arguments in {
        "gruyere_pool_create": [ctypes.c_char_p, ctypes.c_int, u64, u64, ctypes.POINTER(u64)],
        "gruyere_pool_enter": [u64],
        "gruyere_pool_leave": [u64],
        "gruyere_pool_release": [u64, ctypes.POINTER(u64)],
        "gruyere_pool_destroy": [u64, ctypes.POINTER(u64)],
        "gruyere_pool_stats": [u64, ctypes.POINTER(_Stats)],
        "gruyere_pool_blocks": [
            u64,
            ctypes.POINTER(_Block),
            ctypes.c_uint32,
            ctypes.POINTER(ctypes.c_uint32),
        ],
    }.items():
        function = getattr(lib, name)
        function.argtypes, function.restype = arguments, ctypes.c_int
    lib.gruyere_last_error.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
    lib.gruyere_last_error.restype = ctypes.c_size_t
    return lib


def _last_error() -> str:
    message = ctypes.create_string_buffer(4096)
    _declared().gruyere_last_error(message, len(message))
    return message.value.decode(errors="replace")


@dataclass(frozen=True)
class PoolStats:
    """Statistics of one pool, in bytes unless stated otherwise."""

    reserve: int
    """Memory that the pool keeps even if it is idle."""
    limit: Optional[int]
    """Ceiling on the live bytes of the pool; None if it has none of its own."""
    held: int
    """Memory that the pool holds."""
    live: int
    """Live blocks, each rounded up to 512 bytes."""
    live_blocks: int
    """Number of live blocks."""
    pending: int
    """Blocks that the program has freed and streams may still use."""


@dataclass(frozen=True)
class PoolBlock:
    """A live block of a pool."""

    address: int
    bytes: int
    """The size that the program requested."""
    step: Optional[int]
    """The step in which the block was allocated; None if that is not known (`record:off`)."""


class PoolInUse(GruyereError):
    """A pool cannot be released because tensors live in it. `blocks` lists the largest of their
    blocks."""

    def __init__(self, text: str, blocks: list[PoolBlock]) -> None:
        super().__init__(text)
        self.blocks = blocks


class Pool:
    """A named pool of one device, made by gruyere.pool().

    Inside `with pool:`, the calling thread's allocations on that device come from the pool; pools
    nest. `release()` releases all of its memory.
    """

    def __init__(self, name: str, device: int, key: int) -> None:
        self.name = name
        self.device = device
        self._key = key

    def __enter__(self) -> Pool:
        self._check("entered", _declared().gruyere_pool_enter(self._key))
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self._check("left", _declared().gruyere_pool_leave(self._key))

    def release(self) -> int:
        """Release all memory of the pool to the device at once. Returns the number of bytes
        released.

        Synchronises the device first, so that no work uses the pool any more. The pool can be used
        again; its reserve is gone.

        Raises PoolInUse, which lists sizes and steps, if tensors live in the pool; nothing has
        changed then. Raises GruyereError if it is not possible now (a CUDA graph is being captured)
        or if the driver refuses.
        """
        return self._give("released", _declared().gruyere_pool_release)

    def destroy(self) -> int:
        """Release the pool's memory as release() does, and remove the pool, so that another pool
        can have its name."""
        return self._give("destroyed", _declared().gruyere_pool_destroy)

    def stats(self) -> PoolStats:
        """Return the pool's statistics."""
        raw = _Stats(size=ctypes.sizeof(_Stats))
        self._check("read", _declared().gruyere_pool_stats(self._key, ctypes.byref(raw)))
        return PoolStats(
            raw.reserve, raw.limit or None, raw.held, raw.live, raw.live_blocks, raw.pending
        )

    def blocks(self, most: int = _NAMED) -> list[PoolBlock]:
        """Return the largest live blocks, at most `most` of them."""
        found, count = (_Block * most)(), ctypes.c_uint32()
        self._check(
            "read",
            _declared().gruyere_pool_blocks(self._key, found, most, ctypes.byref(count)),
        )
        return [
            PoolBlock(block.address, block.requested, None if block.step < 0 else block.step)
            for block in found[: count.value]
        ]

    def __repr__(self) -> str:
        return f"<gruyere.pool {self.name!r} of device {self.device}>"

    def _give(self, what: str, function: Any) -> int:
        given = ctypes.c_uint64()
        code = function(self._key, ctypes.byref(given))
        if code == _BUSY:
            # Collect unreachable tensors in reference cycles.
            gc.collect()
            code = function(self._key, ctypes.byref(given))
        self._check(what, code)
        return given.value

    def _check(self, what: str, code: int) -> None:
        if code == 0:
            return
        text = f"pool {self.name!r} of device {self.device} cannot be {what}: {_last_error()}"
        raise PoolInUse(text, self.blocks()) if code == _BUSY else GruyereError(text)


def pool(
    name: str, reserve: Union[int, str] = 0, limit: Union[int, str, None] = None, device: Any = None
) -> Pool:
    """Return the pool called `name` on `device` (None: the current device), created if there is
    none.

    `reserve` ("20GiB", "50%" or bytes) is mapped at once and stays in the pool; the reserve of an
    existing pool is raised to it. `limit` is a ceiling on the live bytes of the pool.

        cache = gruyere.pool("kv-cache", reserve="20GiB")
        with cache:
            keys = torch.empty(...)
        del keys
        cache.release()

    Raises GruyereError if Gruyère is not enabled or the memory is not available.
    """
    reason = _enable.disable_reason()
    if reason:
        raise GruyereError(f"pool({name!r}): Gruyère is not enabled: {reason}")
    number = _control.device_number(device)

    def total() -> int:
        return _control.stats(number).total_memory

    wanted = sizes.size("reserve", reserve, total)
    ceiling = 0 if limit is None else sizes.size("limit", limit, total)
    if limit is not None and ceiling == 0:
        raise GruyereError(
            f"pool({name!r}): limit={limit!r} would leave no room for a block; use None for no "
            "limit"
        )
    if "\0" in name:
        raise GruyereError(f"pool({name!r}): a name cannot contain a NUL character")
    key = ctypes.c_uint64()
    if (
        _declared().gruyere_pool_create(name.encode(), number, wanted, ceiling, ctypes.byref(key))
        != 0
    ):
        raise GruyereError(f"pool({name!r}) on device {number}: {_last_error()}")
    return Pool(name, number, key.value)
