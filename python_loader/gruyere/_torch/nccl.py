"""NCCL_GRAPH_REGISTER=0, set where captured collectives could read stale registrations.

NCCL registers the buffers of captured collectives by the mappings that it finds at capture, and
keeps the registration with the graph. Under an allocator that remaps pages (torch's expandable
segments, and Gruyère's pages) devices below compute capability 10 then read freed registrations:
Megatron-LM refuses to capture there without this variable (NVIDIA/Megatron-LM#5474, #2572)."""

from __future__ import annotations

import os
from typing import Any

from .._errors import warn_once
from .._native import conf
from .._ranks import is_first_of_node, place

VARIABLE = "NCCL_GRAPH_REGISTER"
# The first compute capability (major) that reportedly does not have the bug.
_SOUND_FROM = 10
# The backings that remap pages, by their names in GRUYERE_CONF.
_PAGES = ("auto", "stitch")


def install(torch: Any, settings: str) -> None:
    """Set the variable once torch has initialised CUDA, which is before NCCL can start. `settings`
    are GRUYERE_CONF's. A value that the user has set stays."""
    if conf.entries(settings).get("backing", "auto") in _PAGES and VARIABLE not in os.environ:
        torch.cuda._lazy_call(lambda: _switch_off(torch))


def _switch_off(torch: Any) -> None:
    devices = range(torch.cuda.device_count())
    if VARIABLE in os.environ or all(
        torch.cuda.get_device_capability(device)[0] >= _SOUND_FROM for device in devices
    ):
        return
    os.environ[VARIABLE] = "0"
    if (place().world_size or 1) > 1 and is_first_of_node():
        warn_once(
            f"Gruyère has set {VARIABLE}=0: since its pages move, captured collectives could use "
            f"stale registrations on devices below compute capability {_SOUND_FROM}. To choose "
            f"yourself, set {VARIABLE}"
        )
