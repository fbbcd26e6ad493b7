"""mode="behind": torch's own caching allocator serves tensors, and takes its segments from Gruyère.

torch takes segments from somebody else for a `MemPool` only. So each device gets a pool over our
functions, and `_cuda_beginAllocateToPool` routes every thread and stream of the device to it. Two
things of torch's stand in the way, and both are about the pool scope that is never closed: torch
thinks that a capture is going on.

- Blocks that `record_stream` named are not looked at again while a pool scope is open. So it is
  closed and opened again now and then: a *breath*.
- Cached segments of a pool that is in use are never given back, not by `empty_cache` and not when
  memory runs out. So a new pool takes the old one's place (a *turn*), whose cached segments torch
  then gives back.

In either, another thread's tensor may come from torch's own memory for a moment, which is sound.

While a pool scope of the program's is open (a capture, `use_mem_pool`), ours is closed: some
versions of torch ask the oldest pool scope first, and the memory of a graph must be in the graph's
pool. A pool that dies while a pool scope is open ends the process, so the program's own pools die
at the next breath, and there are no breaths and turns meanwhile.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import threading
from typing import Any, Callable, Optional

from . import _library
from ._errors import GruyereError

_NEEDED = (
    "_cuda_beginAllocateToPool",
    "_cuda_endAllocateToPool",
    "_cuda_releasePool",
    "_cuda_customAllocator",
)
_ALL_HOOKS = 3

# A breath after this many bytes were passed to record_stream; a breath takes some microseconds.
_BREATH_BYTES = 64 << 20


def check(torch: Any) -> None:
    """Raises GruyereError where this torch cannot route all memory to a pool."""
    missing = [name for name in _NEEDED if not hasattr(torch._C, name)]
    # torch up to 2.6 knows a pool's allocator for one thread only, through a context object that
    # later versions do not have.
    if not hasattr(torch.cuda, "MemPool") or hasattr(torch._C, "_MemPoolContext") or missing:
        raise GruyereError(
            f'mode="behind" needs torch 2.7 or newer, and this is {torch.__version__}; '
            'mode="direct" works with it'
        )
    backend = torch.cuda.get_allocator_backend()
    if backend != "native":
        raise GruyereError(
            'mode="behind" stands behind torch\'s own caching allocator, and this process '
            f'uses the backend {backend!r}: take backend: out of'
            ' PYTORCH_ALLOC_CONF, or use mode="direct"'
        )
    from . import _torch_conf

    variable, settings = _torch_conf.settings()
    if settings.get("expandable_segments", "").lower() == "true":
        raise GruyereError(
            f"{variable}: expandable_segments:True maps memory itself and cannot take segments "
            "from Gruyère: take it out, or use"
            ' mode="direct", where it has no meaning'
        )


def install(torch: Any) -> Any:
    """Routes every device to Gruyère as soon as CUDA is initialised. Answers what must be kept
    alive."""
    router = _Router(torch)
    torch.cuda._lazy_call(router.begin)
    atexit.register(router.end)
    _when_step_ends(router.breathe)
    _when_recorded(torch, router)
    _when_emptied(torch, router)
    _when_in_scope(torch, router)
    _when_pools_die(torch, router)
    observe = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    # Just before the error is raised: what the program does next finds the cached segments given
    # back.
    torch.cuda._lazy_call(lambda: observe and observe(lambda *_: router.turn()))
    return router


class _Router:
    """The pools that the devices are routed to."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.allocator = torch._C._cuda_customAllocator(
            _library.address("gruyere_segment_malloc"), _library.address("gruyere_free")
        )
        # torch's own functions: the program's calls are counted (below), ours are not.
        self._begin = torch._C._cuda_beginAllocateToPool
        self._end = torch._C._cuda_endAllocateToPool
        self._release = torch._C._cuda_releasePool
        # Its like, but for those that die at once (see _when_pools_die).
        self.pool = type("RoutedPool", (torch.cuda.MemPool,), {"__del__": lambda pool: None})
        self.pools: dict[int, Any] = {}
        self.recorded = 0
        self.is_open = False
        # Pool scopes of the program's that are open now.
        self.scopes = 0
        # Pools of the program's that nobody holds any more.
        self.dead: list[Any] = []
        self.lock = threading.RLock()
        self.process: Optional[int] = None

    def begin(self) -> None:
        with self.lock:
            self.process = os.getpid()
            # torch orders all uses of a segment before it gives it back, and tells us of no others.
            _library.library().gruyere_announce_hooks(_ALL_HOOKS)
            for device in range(self.torch.cuda.device_count()):
                self.pools[device] = self._pool(device)
            self._open_all()

    def end(self) -> None:
        """A pool scope that is still open when the process ends would abort it. In a forked child
        there is nothing to end."""
        with self.lock:
            if self.process == os.getpid():
                if self.is_open:
                    self._close_all()
                self.pools.clear()

    def breathe(self) -> None:
        """Lets torch look at the blocks that wait for events."""
        with self.lock:
            if not self._may_close():
                return
            self.recorded = 0
            used = self._used()
            self._close_all()
            self.dead.clear()
            for device in used:
                self._poke(device)
            self._open_all()

    def turn(self) -> None:
        """Lets torch give its cached segments back: `empty_cache` of what is routed here."""
        with self.lock:
            if not self._may_close():
                return
            self.recorded = 0
            used = self._used()
            self._close_all()
            self.dead.clear()
            for device in used:
                self._poke(device)
                self.pools[device] = self._pool(device)
            self.torch._C._cuda_emptyCache()
            self._open_all()

    def step_aside(self) -> None:
        """The program opens a pool scope."""
        if self.scopes == 0 and self.process == os.getpid():
            self._close_all()
        self.scopes += 1

    def step_back(self) -> None:
        """It has closed one, or meant to."""
        if self.scopes == 0:
            return
        self.scopes -= 1
        if self.scopes == 0 and self.process == os.getpid():
            self._open_all()

    def _may_close(self) -> bool:
        """Not in a forked child, which has no CUDA, and not while a pool scope of the program's is
        open."""
        return self.process == os.getpid() and not self.scopes

    def _used(self) -> list[int]:
        """The devices on which something has been allocated; asking would wake the others."""
        used = self.torch.cuda.memory_reserved
        return [device for device in self.pools if used(device)]

    def _pool(self, device: int) -> Any:
        """A pool belongs to the device that is current when it is made. The change is one that
        torch only notes where the device has not been used, and setting back the device that CUDA
        has all the while is no call: so no device wakes."""
        exchange = getattr(
            self.torch._C, "_cuda_maybeExchangeDevice", self.torch._C._cuda_exchangeDevice
        )
        before = exchange(device)
        try:
            return self.pool(self.allocator)
        finally:
            self.torch._C._cuda_setDevice(before)

    def _poke(self, device: int) -> None:
        """One allocation outside of any pool scope: that is when torch asks its events."""
        block = self.torch.cuda.caching_allocator_alloc(1, device)
        self.torch.cuda.caching_allocator_delete(block)

    def _open_all(self) -> None:
        for device, pool in self.pools.items():
            self._begin(device, pool.id)
        self.is_open = True

    def _close_all(self) -> None:
        self.is_open = False
        for device, pool in self.pools.items():
            self._end(device, pool.id)
            self._release(device, pool.id)


def _when_step_ends(action: Any) -> None:
    # The package torch.optim hides this module's name.
    optimizer = importlib.import_module("torch.optim.optimizer")
    optimizer.register_optimizer_step_post_hook(lambda *_: action())


def _when_recorded(torch: Any, router: _Router) -> None:
    original = torch.Tensor.record_stream

    @functools.wraps(original)
    def record_stream(self: Any, stream: Any) -> None:
        original(self, stream)
        router.recorded += self.untyped_storage().nbytes() if self.is_cuda else 0
        if router.recorded >= _BREATH_BYTES:
            router.breathe()

    torch.Tensor.record_stream = record_stream


def _when_emptied(torch: Any, router: _Router) -> None:
    original = torch.cuda.empty_cache

    @functools.wraps(original)
    def empty_cache() -> None:
        original()
        if torch.cuda.is_initialized():
            router.turn()

    torch.cuda.empty_cache = torch.cuda.memory.empty_cache = empty_cache


def _when_in_scope(torch: Any, router: _Router) -> None:
    """Steps aside for the program's pool scopes: captures, and what it routes to pools of its
    own."""

    def replace(owners: list[Any], name: str, make: Callable[[Any], Any]) -> None:
        original = getattr(owners[0], name, None)
        if original is not None:
            wrapper = functools.wraps(original)(make(original))
            for owner in owners:
                if getattr(owner, name, None) is original:
                    setattr(owner, name, wrapper)

    def beginning(original: Any) -> Any:
        def begin(*arguments: Any, **keywords: Any) -> Any:
            with router.lock:
                router.step_aside()
                try:
                    return original(*arguments, **keywords)
                except BaseException:
                    router.step_back()
                    raise

        return begin

    def ending(original: Any) -> Any:
        def end(*arguments: Any, **keywords: Any) -> Any:
            with router.lock:
                try:
                    return original(*arguments, **keywords)
                finally:
                    # One that fails to end is over all the same.
                    router.step_back()

        return end

    replace([torch.cuda.CUDAGraph], "capture_begin", beginning)
    replace([torch.cuda.CUDAGraph], "capture_end", ending)
    for name in (
        "_cuda_beginAllocateToPool",
        "_cuda_beginAllocateCurrentStreamToPool",
        "_cuda_beginAllocateCurrentThreadToPool",
    ):
        replace([torch._C, torch.cuda.memory], name, beginning)
    replace([torch._C, torch.cuda.memory], "_cuda_endAllocateToPool", ending)


def _when_pools_die(torch: Any, router: _Router) -> None:
    """Keeps a pool of the program's until no pool scope is open. `__del__` may keep its object: it
    is called once only."""

    def keep(self: Any) -> None:
        router.dead.append(self)

    torch.cuda.MemPool.__del__ = keep
