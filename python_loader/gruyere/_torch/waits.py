"""`waits:auto`: deciding whether streams may wait for each other before memory is exhausted.

The allocator can hold much less memory if it may make one stream wait, on the device, for memory
that another stream has freed. Such a wait can hang a program whose enqueued work waits for
something that comes later: collectives and point-to-point communication with other processes, which
may enqueue them in another order; a host function, or a wait on a value in memory, for something
that the host does later (crates/heap/src/order/waits.rs has the argument). So the package allows
waits if the process is the only one and none of this is seen, and forbids them for good before the
first of these:

- a launcher's variable that announces more than one rank;
- a torch.distributed process group of more than one rank, or a torch.cuda.nccl communicator;
- the import of a module that offers these calls to Python or has communication of its own; for
  cuda.bindings, which torch itself imports, the calls themselves.

The heap itself forbids waits once a second device is used. Kernels and C++ extensions are not
checked: a kernel that polls memory until another stream of the program has run hangs with these
waits, as it does under cudaMallocAsync, which adds such waits unless told not to. Use `waits:oom`
for such programs.
"""

from __future__ import annotations

import functools
import os
import threading
from types import ModuleType
from typing import Any, Callable, Optional

from .._imports import when_imported
from .._native import library
from .._ranks import SIZES

# Modules with host functions, waits on values, or communication that torch does not know of.
_MODULES = (
    "cuda.core",
    "cupy",
    "horovod",
    "jax",
    "mpi4py",
    "nccl",
    "numba.cuda",
    "nvshmem",
    "pycuda",
    "tensorflow",
    "torchcomms",
    "ucp",
)

# Calls that make a stream wait for the host, for a value or for another API's semaphore, and calls
# that add such a node to a graph.
_CALLS = {
    "cuda.bindings.driver": (
        "cuGraphAddBatchMemOpNode",
        "cuGraphAddExternalSemaphoresWaitNode",
        "cuGraphAddHostNode",
        "cuGraphAddNode",
        "cuLaunchHostFunc",
        "cuLaunchHostFunc_v2",
        "cuStreamAddCallback",
        "cuStreamBatchMemOp",
        "cuStreamWaitValue32",
        "cuStreamWaitValue64",
        "cuWaitExternalSemaphoresAsync",
    ),
    "cuda.bindings.runtime": (
        "cudaGraphAddExternalSemaphoresWaitNode",
        "cudaGraphAddHostNode",
        "cudaGraphAddNode",
        "cudaLaunchHostFunc",
        "cudaLaunchHostFunc_v2",
        "cudaStreamAddCallback",
        "cudaWaitExternalSemaphoresAsync",
    ),
}

_lock = threading.Lock()
_installed = False


def install(torch: Any) -> None:
    """Allow waits if this process is the only one, and watch for whatever forbids them. Called by
    enable(), once Gruyère is torch's allocator."""
    global _installed
    with _lock:
        if _installed:
            return
        _installed = True
    for variable in SIZES:
        if os.environ.get(variable, "1").strip() not in ("", "0", "1"):
            forbid(f"{variable}={os.environ[variable]}")
            return
    # A module that is imported already forbids waits at once.
    for name in _MODULES:
        when_imported(name, _foreign)
    for name, calls in _CALLS.items():
        when_imported(name, functools.partial(_watch_calls, calls))
    if not _watch_groups(torch):
        forbid("this torch creates process groups in a way that Gruyère does not know")
        return
    library.load().gruyere_allow_waits()


def forbid(why: str) -> None:
    """Forbid waits in the library: from now on a wait may close a cycle."""
    library.load().gruyere_forbid_waits(why.encode())


def _foreign(module: ModuleType) -> None:
    forbid(f"the program imports {module.__name__}, which may enqueue work that waits for the host")


def _watch_calls(calls: tuple[str, ...], module: ModuleType) -> None:
    for call in calls:
        if hasattr(module, call):
            why = f"the program calls {call}"
            _before(module, call, lambda *_, why=why, **__: why)


def _watch_groups(torch: Any) -> bool:
    """Forbid waits before a group of more than one rank or a communicator is created. Returns False
    if that cannot be watched."""
    if not torch.distributed.is_available():
        return True

    def of_ranks(place: int, what: str) -> Callable[..., Optional[str]]:
        def why(*arguments: Any, **named: Any) -> Optional[str]:
            named_size = named.get("group_size", named.get("num_ranks", named.get("size")))
            ranks = arguments[place] if len(arguments) > place else named_size
            return None if ranks == 1 else f"the program creates {what} of {ranks} ranks"

        return why

    groups = torch.distributed.distributed_c10d
    nccl = getattr(torch.distributed, "ProcessGroupNCCL", None)
    if not hasattr(groups, "_new_process_group_helper"):
        return False
    _before(groups, "_new_process_group_helper", of_ranks(0, "a torch.distributed process group"))
    if nccl is not None:
        # Created without torch.distributed's own functions, from a store, a rank and a size.
        _before(nccl, "__init__", of_ranks(3, "an NCCL process group"))
    if hasattr(torch.cuda, "nccl") and hasattr(torch.cuda.nccl, "init_rank"):
        _before(torch.cuda.nccl, "init_rank", of_ranks(0, "a torch.cuda.nccl communicator"))
    return True


def _before(owner: Any, name: str, reason: Callable[..., Optional[str]]) -> None:
    """Forbid waits before a call of `owner.name` for whose arguments `reason` returns a text."""
    original: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(original)
    def watched(*arguments: Any, **named: Any) -> Any:
        why = reason(*arguments, **named)
        if why is not None:
            forbid(why)
        return original(*arguments, **named)

    setattr(owner, name, watched)
