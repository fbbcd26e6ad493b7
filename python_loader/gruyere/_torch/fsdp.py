"""FSDP: telling the allocator that the optimizer's stream reads the sharded gradients.

FSDP allocates a sharded gradient on the stream of its reduction; the optimizer reads it on the
program's own stream, and `zero_grad` frees it, perhaps long before that is done. torch's allocator
gives the block to the reduction's stream alone, which by then waits for the program's; so FSDP
calls no `record_stream`. Gruyère may give it to any stream once the reduction's is past the free: a
loader's could write into a gradient that the optimizer is still to read. From torch 2.15 on FSDP2
says who reads it, to allocators that ask (`fsdp::record_grad_output_stream`). The buffers of an
all-reduce (before torch 2.15) and of a gather that no further one follows are freed after the
program's stream has waited for them, and not their own.
"""

from __future__ import annotations

import functools
import sys
import threading
from types import ModuleType
from typing import Any, Callable

from .._imports import when_imported

_COLLECTIVES = "torch.distributed.fsdp._fully_shard._fsdp_collectives"
# Where FSDP2 calls its reduction; the second in torch 2.4 and 2.5.
_FSDP2 = (
    "torch.distributed.fsdp._fully_shard._fsdp_param_group",
    "torch.distributed._composable.fsdp._fsdp_param_group",
)
_FSDP1 = "torch.distributed.fsdp._runtime_utils"

_lock = threading.Lock()
_installed = False
# Implementations of operators last as long as their library.
_libraries: list[Any] = []


def install() -> None:
    """Watch for FSDP's import, once. Called by enable()."""
    global _installed
    with _lock:
        if _installed:
            return
        _installed = True
    when_imported(_COLLECTIVES, _implement)
    for module in _FSDP2:
        when_imported(module, _wrap_fsdp2)
    when_imported(_FSDP1, _wrap_fsdp1)


def _asks(module: ModuleType) -> bool:
    return hasattr(module, "record_grad_output_stream")


def _implement(collectives: ModuleType) -> None:
    """FSDP2 of torch 2.15 and later: answer its question."""
    import torch

    if not _asks(collectives):
        return

    def record(buffer: Any, stream_id: int, device_index: int, device_type: int) -> None:
        buffer.record_stream(
            torch.cuda.Stream(
                stream_id=stream_id, device_index=device_index, device_type=device_type
            )
        )

    operators = torch.library.Library("fsdp", "IMPL")
    operators.impl("record_grad_output_stream", record, "CUDA")
    _libraries.append(operators)


def _wrap_fsdp2(group: ModuleType) -> None:
    _wrap_reduce(group)
    _wrap_release(group)


def _wrap_reduce(group: ModuleType) -> None:
    """FSDP2 of earlier torch: record the caller's stream on what a reduction leaves."""
    import torch

    reduce = getattr(group, "foreach_reduce", None)
    collectives = sys.modules.get(getattr(reduce, "__module__", ""))
    if reduce is None or collectives is None or _asks(collectives):
        return

    @functools.wraps(reduce)
    def recorded(parameters: Any, *arguments: Any, **named: Any) -> Any:
        result = reduce(parameters, *arguments, **named)
        if torch.compiler.is_compiling():
            return result
        gradients = (getattr(parameter.sharded_param, "grad", None) for parameter in parameters)
        for gradient in gradients:
            _record_current(getattr(gradient, "_local_tensor", None))
        # The buffer of an all-reduce among them.
        for buffer in result if isinstance(result, tuple) else ():
            _record_current(buffer)
        return result

    group.foreach_reduce = recorded  # type: ignore[attr-defined]


def _wrap_release(group: ModuleType) -> None:
    """FSDP2 of torch 2.15 and later: record the current stream on a gather's output, which may be
    freed when that stream alone has waited for its last use."""
    context = getattr(group, "FSDPCommContext", None)
    release = getattr(context, "release_all_gather_state_on_current_stream", None)
    if context is None or release is None:
        return

    @functools.wraps(release)
    def recorded(self: Any) -> None:
        gathered = getattr(self.all_gather_state, "all_gather_result", None)
        _record_current(getattr(gathered, "all_gather_output", None))
        release(self)

    context.release_all_gather_state_on_current_stream = recorded


def _record_current(buffer: Any) -> None:
    """Record the calling thread's stream on `buffer`, if that is memory of a device."""
    import torch

    if isinstance(buffer, torch.Tensor) and buffer.is_cuda:
        buffer.record_stream(torch.cuda.current_stream(buffer.device))


def _wrap_fsdp1(runtime: ModuleType) -> None:
    """FSDP1: record the stream of the forward and the optimizer on each reduced gradient."""
    accumulate: Callable[..., Any] = getattr(runtime, "_accumulate_sharded_grad", None)
    record = getattr(runtime, "_no_dispatch_record_stream", None)
    if accumulate is None or record is None:
        return

    @functools.wraps(accumulate)
    def recorded(state: Any, *arguments: Any, **named: Any) -> Any:
        gradient = accumulate(state, *arguments, **named)
        if gradient.is_cuda:
            record(gradient, state._default_stream)
        return gradient

    runtime._accumulate_sharded_grad = recorded  # type: ignore[attr-defined]
