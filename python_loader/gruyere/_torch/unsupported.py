"""Warnings and errors for what cannot work through the pluggable door: torch calls functions of its
own allocator that a pluggable allocator cannot provide. Each causes one warning, or an error that
says what to use instead. The table in docs/pytorch.md lists them, with the lines of torch that are
the cause."""

from __future__ import annotations

import functools
import os
from typing import Any, Callable

from .._errors import GruyereError, warn_once
from .._imports import when_imported

_NATIVE = (
    "the native door supports it (python -m gruyere --door native, GRUYERE_CONF=door:native, or "
    'gruyere.enable(door="native"))'
)

CUDNN = (
    "cudnn.benchmark stays off: before torch tries convolution algorithms, it asks its allocator "
    "how much memory is cached, which a pluggable allocator cannot answer. cuDNN's heuristics "
    f"choose the algorithms instead; {_NATIVE}"
)
REDUCE_OVERHEAD = (
    "torch.compile's CUDA graphs (mode 'reduce-overhead' and the like) are turned off, the rest "
    "of the compilation stays: Inductor's graph trees need checkpoints of the allocator, which a "
    f"pluggable allocator cannot make; {_NATIVE}. torch.cuda.graph and "
    "make_graphed_callables work here"
)
GRAPH_TREES = (
    "CUDA graph trees (torch.compile's backend 'cudagraphs', Inductor's triton.cudagraphs) need "
    "checkpoints of the allocator, which a pluggable allocator cannot make: remove the backend or "
    "the option and use torch.cuda.make_graphed_callables or torch.cuda.graph, which work here; "
    f"or {_NATIVE}"
)
IPC = (
    "CUDA tensors cannot be shared with other processes through a pluggable allocator: send a "
    f"copy in host memory (tensor.cpu()), or use collectives (torch.distributed); {_NATIVE}"
)
MEM_POOL = (
    "torch.cuda.MemPool does not work with a pluggable allocator: use gruyere.pool(name), a pool "
    f"that is released as a whole; {_NATIVE}"
)
NCCL = (
    "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK is turned off: NCCL would track the segments "
    "of torch's own allocator, and there are none. Collectives work without it"
)

GROUPS = (
    "torch 2.15's process groups want a snapshot of the allocator, which a pluggable allocator "
    "cannot give, and end the process without it. 'nccl' makes those of earlier versions here "
    f"(TORCH_DIST_USE_NCCL2=0), and 'nccl2' and 'nccl-lazy' cannot be had; {_NATIVE}"
)

_NCCL2 = "TORCH_DIST_USE_NCCL2"
_NCCL_HOOK = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"


def install(torch: Any, native: bool = False) -> None:
    """Put the warnings and errors in place. The native door needs none of them: what it does not
    support raises an error of its own."""
    if native:
        return
    _inductor(torch)
    _nccl_hook()
    when_imported("torch.distributed.distributed_c10d", _earlier_groups)
    _cudnn(torch)
    # torch 2.4 requests the handle from CUDA itself, which refuses it for memory mapped by page.
    _explained(torch.UntypedStorage, "_share_cuda_", IPC, ("does not yet support", "CUDA error"))
    if hasattr(torch.cuda, "MemPool"):
        _explained(torch.cuda.MemPool, "__init__", MEM_POOL, ("does not yet support",))


def _nccl_hook() -> None:
    if os.environ.get(_NCCL_HOOK, "").strip().lower() in ("1", "true", "yes", "on", "y", "t"):
        warn_once(NCCL)
        os.environ[_NCCL_HOOK] = "0"


def _earlier_groups(c10d: Any) -> None:
    """torch reads the variable when the program makes its first group."""
    if not hasattr(c10d, "_create_nccl2_process_group"):
        return
    if os.environ.get(_NCCL2, "") not in ("", "0"):
        warn_once(GROUPS)
    os.environ[_NCCL2] = "0"

    def refuse(*arguments: Any, **keywords: Any) -> None:
        raise GruyereError(GROUPS)

    c10d._create_nccl2_process_group = c10d._create_nccl_lazy_process_group = refuse


def _cudnn(torch: Any) -> None:
    """Keep `torch.backends.cudnn.benchmark` off."""
    original = torch._C._set_cudnn_benchmark

    def set_cudnn_benchmark(wanted: bool) -> None:
        if wanted:
            warn_once(CUDNN)
        original(False)

    if torch._C._get_cudnn_benchmark():
        set_cudnn_benchmark(True)
    # `flags(benchmark=...)` looks the function up; the property `benchmark` bound it at torch's
    # import.
    torch._C._set_cudnn_benchmark = set_cudnn_benchmark
    benchmark = vars(type(torch.backends.cudnn)).get("benchmark")
    if getattr(benchmark, "setter", None) is original:
        benchmark.setter = set_cudnn_benchmark


def _inductor(torch: Any) -> None:
    wrapper = getattr(torch, "_TorchCompileInductorWrapper", None)
    if wrapper is not None:
        original = wrapper.apply_options

        @functools.wraps(original)
        def apply_options(self: Any, options: Any) -> Any:
            answer = original(self, options)
            if self.config.get("triton.cudagraphs"):
                warn_once(REDUCE_OVERHEAD)
                self.config["triton.cudagraphs"] = False
            return answer

        wrapper.apply_options = apply_options
    # All other ways: `torch._inductor.config`, and Dynamo's backend "cudagraphs".
    when_imported("torch._inductor.cudagraph_trees", _no_graph_trees)


def _no_graph_trees(trees: Any) -> None:
    def refuse(self: Any, *arguments: Any, **keywords: Any) -> None:
        raise GruyereError(GRAPH_TREES)

    trees.CUDAGraphTreeManager.__init__ = refuse


def _explained(owner: Any, name: str, remedy: str, refusals: tuple[str, ...]) -> None:
    """Replace the error that `owner.name` raises (known by one of `refusals` in its text) by one
    that says what to use instead."""
    original: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(original)
    def explained(*arguments: Any, **keywords: Any) -> Any:
        try:
            return original(*arguments, **keywords)
        except RuntimeError as error:
            if not any(refusal in str(error) for refusal in refusals):
                raise
            raise GruyereError(remedy) from error

    setattr(owner, name, explained)
