"""What is registered with NCCL: only memory that stays where it is.

NCCL hands what it registers to peers and network cards, which go on using those bytes of the device
whatever is mapped at the address later. Gruyère's pages move, so what torch would register is kept
from it:

- torch 2.15's process groups register the segments of ordinary memory, earlier ones where
  TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK asks for it. Both leave it where segments expand,
  which is why torch's setting `expandable_segments` is on through the native door. MemPools are
  registered: their segments stay.
- The buffers of captured collectives, which NCCL registers by the mappings that it finds at
  capture, and keeps with the graph: devices below compute capability 10 then read freed
  registrations, under torch's expandable segments as under Gruyère's pages. Megatron-LM refuses to
  capture there without NCCL_GRAPH_REGISTER=0 (NVIDIA/Megatron-LM#5474, #2572)."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from .._errors import warn_once
from .._native import conf
from . import alloc_conf

VARIABLE = "NCCL_GRAPH_REGISTER"
# The first compute capability (major) that reportedly does not have the bug.
_SOUND_FROM = 10
# The backings that remap pages, by their names in GRUYERE_CONF.
_PAGES = ("auto", "stitch")


def install(torch: Any, settings: str, native: bool) -> None:
    """Keep memory that moves from being registered. `settings` are GRUYERE_CONF's."""
    if native:
        _expand(torch)
    _choose_graphs(torch, settings)


def settle(torch: Any) -> None:
    """Have torch read its settings while its own allocator is there, with which it compares
    `backend`. An error in them is torch's to raise, at the program's first use of CUDA memory."""
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if change is not None:
        with contextlib.suppress(RuntimeError, ValueError):
            change(torch._C._accelerator_getAllocatorSettings())


def _expand(torch: Any) -> None:
    """Keep torch's setting `expandable_segments` on. Without a GPU, and before CUDA starts."""
    change = torch._C._accelerator_setAllocatorSettings

    def set_settings(text: str) -> None:
        change(expanding(text))

    torch._C._accelerator_setAllocatorSettings = set_settings
    with contextlib.suppress(RuntimeError, ValueError):
        set_settings(torch._C._accelerator_getAllocatorSettings())


def expanding(settings: str) -> str:
    """torch's allocator settings, with `expandable_segments` on. Without a backend: torch compares
    it with its allocator, which is Gruyère now."""
    rest = alloc_conf.without_choice(settings)
    return ",".join(filter(None, [rest, "expandable_segments:True"]))


def _choose_graphs(torch: Any, settings: str) -> None:
    """Set the variable once torch has initialised CUDA, which is before NCCL can start. A value
    that the user has set stays."""
    if conf.entries(settings).get("backing", "auto") in _PAGES and VARIABLE not in os.environ:
        torch.cuda._lazy_call(lambda: _switch_off(torch))


def _switch_off(torch: Any) -> None:
    devices = range(torch.cuda.device_count())
    if VARIABLE in os.environ or all(
        torch.cuda.get_device_capability(device)[0] >= _SOUND_FROM for device in devices
    ):
        return
    os.environ[VARIABLE] = "0"
    if int(os.environ.get("WORLD_SIZE") or 1) > 1 and os.environ.get("LOCAL_RANK", "0") == "0":
        warn_once(
            f"Gruyère has set {VARIABLE}=0: since its pages move, captured collectives could use "
            f"stale registrations on devices below compute capability {_SOUND_FROM}. To choose "
            f"yourself, set {VARIABLE}"
        )
