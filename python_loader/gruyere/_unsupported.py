"""What cannot work: torch asks its own allocator for things that it does not let a pluggable one
offer. Each is warned of once, or its error says what to use instead. The table in docs/pytorch.md
has them all, with the lines of torch's that force them."""

from __future__ import annotations

import functools
import os
from typing import Any, Callable

from ._errors import GruyereError, warn_once
from ._imports import when_imported

_NATIVE = (
    "the native door keeps it (python -m gruyere --door native, GRUYERE_CONF=door:native, or "
    'gruyere.enable(door="native"))'
)

CUDNN = (
    "cudnn.benchmark stays off: to try convolution algorithms torch asks its allocator how much it "
    "caches, and lets no pluggable one answer. cuDNN's heuristics choose instead; "
    f"{_NATIVE}"
)
REDUCE_OVERHEAD = (
    "torch.compile's CUDA graphs (mode 'reduce-overhead' and the like) are left off, the "
    "rest of the compilation stays: Inductor's graph trees need checkpoints of the allocator, "
    f"which torch lets no pluggable one make; {_NATIVE}. torch.cuda.graph and "
    "make_graphed_callables work here"
)
GRAPH_TREES = (
    "CUDA graph trees (torch.compile's backend 'cudagraphs', Inductor's triton.cudagraphs) need "
    "checkpoints of the allocator, which torch lets no pluggable one make: leave the backend or "
    "the option out and take torch.cuda.make_graphed_callables or torch.cuda.graph, which work "
    f"here; or {_NATIVE}"
)
IPC = (
    "CUDA tensors cannot be shared with other processes while Gruyère serves them: send a "
    "copy in host memory (tensor.cpu()), or use collectives (torch.distributed)"
)
MEM_POOL = (
    "torch.cuda.MemPool needs an allocator that is no pluggable one: gruyere.pool(name) is a pool "
    f"that is given back whole; {_NATIVE}"
)
NCCL = (
    "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK is turned off: NCCL would follow the "
    "segments of torch's own allocator, which there are none of. Collectives work without"
)

_NCCL_HOOK = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"


def install(torch: Any, native: bool = False) -> None:
    """Watches for what cannot work. By the native door there is less of it, and what torch asks for
    says itself why not."""
    if native:
        return
    _inductor(torch)
    _nccl_hook()
    _cudnn(torch)
    # torch 2.4 asks CUDA itself for the handle, which CUDA refuses for memory mapped page by page.
    _explained(torch.UntypedStorage, "_share_cuda_", IPC, ("does not yet support", "CUDA error"))
    if hasattr(torch.cuda, "MemPool"):
        _explained(torch.cuda.MemPool, "__init__", MEM_POOL, ("does not yet support",))


def _nccl_hook() -> None:
    if os.environ.get(_NCCL_HOOK, "").strip().lower() in ("1", "true", "yes", "on", "y", "t"):
        warn_once(NCCL)
        os.environ[_NCCL_HOOK] = "0"


def _cudnn(torch: Any) -> None:
    """Keeps `torch.backends.cudnn.benchmark` off."""
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
    # By any other way: `torch._inductor.config`, or Dynamo's backend "cudagraphs".
    when_imported("torch._inductor.cudagraph_trees", _no_graph_trees)


def _no_graph_trees(trees: Any) -> None:
    def refuse(self: Any, *arguments: Any, **keywords: Any) -> None:
        raise GruyereError(GRAPH_TREES)

    trees.CUDAGraphTreeManager.__init__ = refuse


def _explained(owner: Any, name: str, remedy: str, refusals: tuple[str, ...]) -> None:
    """Makes torch's refusal in `owner.name`, known by one of `refusals` in its text, an error that
    says what to use instead."""
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
