"""Says when streams may wait for each other before memory is exhausted (`waits:auto`).

The allocator can hold much less where it makes one stream wait, on the device, for memory that
another has freed. Such a wait can hang a program whose enqueued work waits for something that comes
later: collectives and point-to-point communication with other processes, which those may enqueue in
another order; a host function, or a wait on a value in memory, for what the host does later
(crates/heap/src/order/waits.rs has the argument). So the package allows waits in a process that is
alone and in which it sees nothing of the kind, and forbids them, for good, before the first such
thing:

- a launcher's variable that says that there are more ranks;
- a process group of torch.distributed of more than one rank, or a communicator of torch.cuda.nccl;
- a module that gives Python the calls in question, or communication of its own; of cuda.bindings,
  which torch itself imports, the calls.

The heap itself forbids them once a second device is used. Kernels and C++ extensions are not looked
into: one that polls memory until the program's other stream has run hangs with these waits, as it
does under cudaMallocAsync, which adds such waits unless told not to. `waits:oom` is for it.
"""

from __future__ import annotations

import functools
import os
import threading
from types import ModuleType
from typing import Any, Callable, Optional

from . import _library
from ._imports import when_imported

# The number of processes of a launcher: torchrun and its kin, Open MPI, MPICH and Intel's MPI,
# MVAPICH, PMIx, Slurm.
_LAUNCHERS = (
    "WORLD_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "PMIX_SIZE",
    "SLURM_NTASKS",
)
# Host functions and waits on values from Python; communication unknown to torch.
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

# Calls that make a stream wait for its host, for a value or for another interface's semaphore, and
# calls that add such a node to a graph.
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
    """Allows waits if this process is alone, and watches for what forbids them. Called by
    enable(), once torch's requests come to Gruyère."""
    global _installed
    with _lock:
        if _installed:
            return
        _installed = True
    for variable in _LAUNCHERS:
        if os.environ.get(variable, "1").strip() not in ("", "0", "1"):
            forbid(f"{variable}={os.environ[variable]}")
            return
    # Modules imported already forbid at once.
    for name in _MODULES:
        when_imported(name, _foreign)
    for name, calls in _CALLS.items():
        when_imported(name, functools.partial(_watch_calls, calls))
    if not _watch_groups(torch):
        forbid("this torch makes process groups in a way that is not known")
        return
    _library.library().gruyere_allow_waits()


def forbid(why: str) -> None:
    """Tells the library that a wait may close a cycle from now on."""
    _library.library().gruyere_forbid_waits(why.encode())


def _foreign(module: ModuleType) -> None:
    forbid(f"the program imports {module.__name__}, which may enqueue what waits for its host")


def _watch_calls(calls: tuple[str, ...], module: ModuleType) -> None:
    for call in calls:
        if hasattr(module, call):
            why = f"the program calls {call}"
            _before(module, call, lambda *_, why=why, **__: why)


def _watch_groups(torch: Any) -> bool:
    """Forbids waits before a group of more than one rank, or a communicator, is made. False: that
    cannot be seen."""
    if not torch.distributed.is_available():
        return True

    def of_ranks(place: int, what: str) -> Callable[..., Optional[str]]:
        def why(*arguments: Any, **named: Any) -> Optional[str]:
            named_size = named.get("group_size", named.get("num_ranks", named.get("size")))
            ranks = arguments[place] if len(arguments) > place else named_size
            return None if ranks == 1 else f"the program makes {what}, of {ranks} ranks"

        return why

    groups = torch.distributed.distributed_c10d
    nccl = getattr(torch.distributed, "ProcessGroupNCCL", None)
    if not hasattr(groups, "_new_process_group_helper"):
        return False
    _before(groups, "_new_process_group_helper", of_ranks(0, "a group of torch.distributed"))
    if nccl is not None:
        # Made without torch.distributed's own functions, from a store, a rank and a size.
        _before(nccl, "__init__", of_ranks(3, "a group of NCCL"))
    if hasattr(torch.cuda, "nccl") and hasattr(torch.cuda.nccl, "init_rank"):
        _before(torch.cuda.nccl, "init_rank", of_ranks(0, "a communicator of torch.cuda.nccl"))
    return True


def _before(owner: Any, name: str, reason: Callable[..., Optional[str]]) -> None:
    """Forbids waits before `owner.name` is called with arguments for which there is a `reason`."""
    original: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(original)
    def watched(*arguments: Any, **named: Any) -> Any:
        why = reason(*arguments, **named)
        if why is not None:
            forbid(why)
        return original(*arguments, **named)

    setattr(owner, name, watched)
