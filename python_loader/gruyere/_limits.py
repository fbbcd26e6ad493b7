"""What cannot work while Gruyère serves every tensor: torch asks its own allocator for things that
it does not let others offer. Each is warned of once, or its error says what to use instead. The
table in docs/pytorch.md has them all."""

from __future__ import annotations

import functools
import os
from typing import Any, Callable

from ._errors import GruyereError, warn_once
from ._imports import when_imported

_BEHIND = 'gruyere.enable(mode="behind") (or GRUYERE_ENABLE=behind) keeps it'

CUDNN = (
    "cudnn.benchmark stays off: to try convolution algorithms torch asks its own allocator "
    "how much it caches, and raises an error under"
    f" any other. cuDNN's heuristics choose instead; {_BEHIND}"
)
REDUCE_OVERHEAD = (
    "torch.compile's CUDA graphs (mode 'reduce-overhead' and the like) are left off, the "
    "rest of the compilation stays: Inductor's graph"
    f" trees need checkpoints of torch's own allocator. {_BEHIND}; torch.cuda.graph and "
    "make_graphed_callables work here"
)
GRAPH_TREES = (
    "Inductor's CUDA graph trees need checkpoints of torch's own allocator: turn CUDA "
    "graphs off (torch._inductor.config.triton.cudagraphs"
    f" = False), or use torch.cuda.graph or make_graphed_callables, which work here; {_BEHIND}"
)
IPC = (
    "CUDA tensors cannot be shared with other processes while Gruyère serves them: send a "
    "copy in host memory (tensor.cpu()), or use"
    f" collectives (torch.distributed); {_BEHIND}"
)
MEM_POOL = (
    "torch.cuda.MemPool needs torch's own allocator: gruyere.pool(name) is a pool that is "
    f"given back whole; {_BEHIND}"
)
NCCL = (
    "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK is turned off: NCCL would follow the "
    "segments of torch's own allocator, which there"
    f" are none of. Collectives work without; {_BEHIND}"
)

_NCCL_HOOK = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"


def install(torch: Any, native: bool = False) -> None:
    """Watches for what cannot work. In direct mode only. By the native door there is less of it,
    and what torch asks for says itself why not."""
    if native:
        return
    _inductor(torch)
    _nccl_hook()
    _cudnn(torch)
    # torch 2.4 asks CUDA itself for the handle, which it refuses for memory that is mapped page by
    # page.
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
    # `flags(benchmark=...)` looks the function up; the property `benchmark` took it when torch was
    # imported.
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
    # By any other way to them: `torch._inductor.config`, or Dynamo's backend "cudagraphs".
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
