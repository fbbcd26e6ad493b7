"""Puts Gruyère in the place of torch's allocator."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, Optional

from . import _library

# Each hook's setter on torch's allocator object, and our function for it. All of them exist from torch 2.4 on.
_HOOKS = {
    "set_init_fn": "gruyere_init",
    "set_reset_fn": "gruyere_reset",
    "set_memory_fraction_fn": "gruyere_memory_fraction",
    "set_base_alloc_fn": "gruyere_base_alloc",
    "set_record_stream_fn": "gruyere_record_stream",
    "set_begin_allocate_to_pool": "gruyere_begin_allocate_to_pool",
    "set_end_allocate_to_pool_fn": "gruyere_end_allocate_to_pool",
    "set_release_pool": "gruyere_release_pool",
}
_ALL_HOOKS = 3

_allocator: Optional[Any] = None


def enable() -> None:
    """Makes Gruyère the allocator of this process. Before the program touches CUDA."""
    global _allocator
    import torch

    allocator = torch._C._cuda_customAllocator(_library.address("gruyere_malloc"), _library.address("gruyere_free"))
    for setter, function in _HOOKS.items():
        getattr(allocator, setter)(_library.address(function))
    torch._C._cuda_changeCurrentAllocator(allocator)
    _library.library().gruyere_announce_hooks(_ALL_HOOKS)
    _allocator = allocator
    _install("_truth")
    _install("_steps")


def is_enabled() -> bool:
    """Whether Gruyère serves this process's CUDA memory."""
    return _allocator is not None


def disable_reason() -> Optional[str]:
    """Why Gruyère is not enabled; None where it is."""
    return None if is_enabled() else "gruyere.enable() has not been called"


def _install(part: str) -> None:
    """Lets another part of the package put its changes to torch in place."""
    name = f"{__package__}.{part}"
    if importlib.util.find_spec(name):
        importlib.import_module(name).install()
