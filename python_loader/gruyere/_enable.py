"""gruyere.enable(): replaces torch's CUDA allocator with Gruyère."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
from dataclasses import dataclass
from typing import Any, Optional

from . import _children, _signals, _stand_in, _steps
from ._errors import GruyereError, NoCuda, NoGpu, warn_once, warning_afterwards
from ._native import conf, library, shim
from ._ranks import is_first_of_node
from ._torch import (
    alloc_conf,
    backward_end,
    blame,
    events,
    nccl,
    profiler,
    rank,
    stats,
    streams,
    uncaught,
    unsupported,
    waits,
)

# Child processes inherit it and enable Gruyère too; set by `GRUYERE_ENABLE=1 python train.py`.
VARIABLE = "GRUYERE_ENABLE"

# The setter of each hook on torch's allocator object, and our function for it. torch has all of
# them since 2.4.
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


@dataclass(frozen=True)
class Enabled:
    """How this process was enabled."""

    settings: str
    # Enabled by the launch line, not by a call in the program.
    automatic: bool
    # torch keeps only a pointer to the allocator object; this reference keeps it alive.
    allocator: Any
    # The door ("native" or "pluggable") and the reason for it.
    door: str
    door_reason: str


_lock = threading.Lock()
_enabled: Optional[Enabled] = None
_REPLACED = (
    "Gruyère was replaced by another allocator after it was enabled "
    "(torch.cuda.memory.change_current_allocator): remove that call"
)
_reason = (
    "gruyere.enable() has not been called; call it before the program uses CUDA, or launch "
    "with python -m gruyere or GRUYERE_ENABLE=1"
)


def enable(**settings: object) -> None:
    """Make Gruyère the CUDA allocator of this process and of the processes that it starts.

    Call it before the program touches CUDA. `settings` are keys of GRUYERE_CONF, as in
    `enable(limit="90%", share=False)`; they override the settings of the environment.

    Raises GruyereError and changes nothing if CUDA is already in use, if Gruyère was enabled before
    with other settings, if there is no CUDA or no library, if torch lacks a function that Gruyère
    needs, or if a setting is wrong. A call that adds nothing to an earlier call, or to a launch
    with `python -m gruyere` or GRUYERE_ENABLE=1, does nothing.
    """
    _enable(settings, automatic=False)


def enable_automatically(required: bool) -> None:
    """Enable Gruyère for the launch line, once torch is imported. Without CUDA: raise NoCuda if
    `required`, which the launch line reports (`_launch.main`); otherwise let the program go on."""
    try:
        _enable({}, automatic=True)
    except NoCuda:
        # disable_reason() returns the reason. A launcher, a data worker or a node without a GPU has
        # nothing to allocate.
        if required:
            raise


def is_wanted() -> bool:
    """Whether GRUYERE_ENABLE asks for Gruyère.

    Raises GruyereError if its value is neither yes nor no.
    """
    text = os.environ.get(VARIABLE, "").strip().lower()
    if text in ("", "0", "off", "false", "no"):
        return False
    if text in ("1", "on", "true", "yes"):
        return True
    raise GruyereError(f"{VARIABLE}={text}: expected 1 or 0")


def is_enabled() -> bool:
    """Return whether Gruyère is this process's CUDA allocator."""
    return disable_reason() is None


def door() -> Optional[tuple[str, str]]:
    """The door in use, "native" or "pluggable", and the reason for it; None if Gruyère is not
    enabled."""
    return (_enabled.door, _enabled.door_reason) if _enabled and is_enabled() else None


def disable_reason() -> Optional[str]:
    """Return why Gruyère is not enabled, as text for the user, or None if it is enabled."""
    torch = sys.modules.get("torch")
    if _enabled is None:
        if torch is None and os.environ.get(VARIABLE) and "gruyere._startup" in sys.modules:
            return "torch has not been imported yet; Gruyère will be enabled when it is imported"
        return _reason
    if torch is not None and _in_bad_fork(torch):
        return (
            "this process was forked from one that uses CUDA, so it cannot use CUDA itself; "
            "start it with the spawn method"
        )
    if _enabled.door == "native" and not shim.is_current():
        return _REPLACED
    return None


def _enable(settings: dict[str, object], automatic: bool) -> None:
    # Before the lock: if the launch line asks for Gruyère, this import enables it.
    torch = _import_torch()
    with warning_afterwards():
        _put_in_place(torch, settings, automatic)


def _put_in_place(torch: Any, settings: dict[str, object], automatic: bool) -> None:
    global _enabled, _reason
    with _lock:
        if _enabled is not None:
            _check_again(_enabled, settings)
            return
        try:
            _enabled = _swap(torch, settings, automatic)
        except GruyereError as error:
            _reason = str(error)
            raise
    # Child processes enable Gruyère when they import torch.
    os.environ[VARIABLE] = "1"
    if _enabled.door == "pluggable":
        # The native door needs neither: torch's own functions return the right numbers there.
        stats.install()
        profiler.install()
    _steps.install()
    _children.install()
    _signals.install()
    streams.install()
    events.install()


def _check_again(before: Enabled, settings: dict[str, object]) -> None:
    """Raise GruyereError for a second call with other settings. A call that adds nothing is
    allowed: the launch line has enabled Gruyère already, or a notebook cell runs again."""
    asked = {entry for entry in before.settings.split(",") if entry}
    new = sorted(f"{key}:{conf.value(key, value)}" for key, value in settings.items())
    missing = [entry for entry in new if entry not in asked]
    if not before.automatic:
        if missing:
            raise GruyereError(
                "gruyere.enable() was called before in this process, with other settings "
                f"({before.settings!r}; now {', '.join(missing)}): the settings of the first call "
                "hold until the process ends; to change them, restart the process (in a notebook, "
                "the kernel)"
            )
        return
    if missing:
        options = " ".join(f"--{entry.replace(':', ' ', 1)}" for entry in missing)
        raise GruyereError(
            "the launch line has enabled Gruyère already, and this call asks for more: give it to "
            f"the launch line (python -m gruyere {options} ..., or GRUYERE_CONF="
            f"{','.join(missing)}), or start the program without Gruyère and let the call enable it"
        )


# Errors that `import torch` raises if torch is incomplete (ValueError without the nvidia packages).
BROKEN = (ImportError, OSError, ValueError)


def _import_torch() -> Any:
    try:
        import torch
    except BROKEN as error:
        raise GruyereError(
            f"torch cannot be imported here ({error}): install PyTorch 2.4 or newer, built for CUDA"
        ) from error
    return torch


def _swap(torch: Any, settings: dict[str, object], automatic: bool) -> Enabled:
    _check_torch(torch)
    # First: where there is no CUDA, no setting of a fleet's environment may end a program.
    _check_cuda(torch)
    limit = _limit(settings)
    whole = conf.checked({**({"limit": limit} if limit else {}), **settings})
    chosen, why, allocator = _take(torch, whole)
    if chosen == "native":
        _watch_changes(torch)
    # The library reads it at the first request, child processes when they start.
    os.environ[conf.VARIABLE] = whole
    nccl.install(torch, whole)
    waits.install(torch)
    rank.install(torch)
    blame.install(whole)
    backward_end.install(torch)
    uncaught.install(torch)
    said = alloc_conf.line(limit is not None, shim.counts_rejections(torch, chosen))
    if said:
        _say(said)
    # A dry run reports it itself.
    if _stand_in.is_device() and os.environ.get(_stand_in.DRYRUN) != "1":
        _say(
            "this process runs on the stand-in GPU, which accounts for memory and computes nothing"
        )
    return Enabled(whole, automatic, allocator, chosen, why)


def _say(line: str) -> None:
    """Warn once per node: every rank would print the same line."""
    if is_first_of_node():
        warn_once(line)


def _take(torch: Any, settings: str) -> tuple[str, str, Any]:
    """Make Gruyère torch's allocator. Returns the door, the reason for it, and the object to keep
    alive."""
    door, why = open_door(torch, settings)
    if door == "native":
        library.load().gruyere_announce_hooks(_ALL_HOOKS)
        unsupported.install(torch, native=True)
        return door, why, None
    if not why.startswith("door:"):
        _say(f"{why}. The pluggable door is used instead (door:pluggable hides this warning)")
    allocator = _pluggable(torch)
    library.load().gruyere_announce_hooks(_ALL_HOOKS)
    unsupported.install(torch)
    return "pluggable", why, allocator


def open_door(torch: Any, settings: str) -> tuple[str, str]:
    """The door for these settings, and the reason for it. If it is the native door, it is installed
    on return; that needs no GPU."""
    wanted = conf.entries(settings).get("door", "auto")
    if wanted != "pluggable":
        try:
            shim.install(torch)
        except shim.Unavailable as error:
            return "pluggable", f"the native door is not available: {error}"
        return "native", f"door:{wanted}"
    return "pluggable", f"door:{wanted}"


def _watch_changes(torch: Any) -> None:
    """Warn where the program makes another allocator torch's: nothing else would show it. Behind
    the pluggable door torch refuses that itself."""
    original = torch._C._cuda_changeCurrentAllocator

    @functools.wraps(original)
    def change(allocator: Any) -> None:
        original(allocator)
        if not shim.is_current():
            warn_once(_REPLACED)

    torch._C._cuda_changeCurrentAllocator = change


def _pluggable(torch: Any) -> Any:
    allocator = torch._C._cuda_customAllocator(
        library.address("gruyere_malloc"), library.address("gruyere_free")
    )
    missing = [setter for setter in _HOOKS if not hasattr(allocator, setter)]
    if missing:
        raise _too_old(torch, missing)
    for setter, function in _HOOKS.items():
        getattr(allocator, setter)(library.address(function))
    try:
        torch._C._cuda_changeCurrentAllocator(allocator)
    except RuntimeError as error:
        raise GruyereError(
            f"torch refuses to change its allocator ({str(error).splitlines()[0]}): the program "
            "has already set another allocator; enable Gruyère first, and only Gruyère"
        ) from error
    return allocator


def _limit(settings: dict[str, object]) -> Optional[str]:
    """torch's memory fraction as our limit, if `limit` itself is not set."""
    ours = conf.keys(os.environ.get(conf.VARIABLE, "")) | set(settings)
    return None if "limit" in ours else alloc_conf.limit()


def takes_limit(settings: dict[str, object]) -> bool:
    """Whether torch's memory fraction becomes our limit, given a call's settings."""
    return _limit(settings) is not None


def _check_torch(torch: Any) -> None:
    if getattr(torch.version, "hip", None):
        raise NoCuda(
            "this torch is built for ROCm, and Gruyère manages CUDA memory: install a torch "
            "built for CUDA"
        )
    if torch.version.cuda is None:
        raise NoCuda(
            f"this torch ({torch.__version__}) is built without CUDA: install a torch built for "
            "CUDA"
        )
    if not hasattr(torch._C, "_cuda_customAllocator"):
        raise _too_old(torch, ["_cuda_customAllocator"])


def _too_old(torch: Any, missing: list[str]) -> GruyereError:
    return GruyereError(
        f"this torch ({torch.__version__}) lacks {', '.join(missing)}: install torch 2.4 or newer"
    )


def _check_cuda(torch: Any) -> None:
    if _in_bad_fork(torch):
        raise GruyereError(
            "this process was forked from one that uses CUDA, so it cannot use CUDA itself: "
            "start it with the spawn method"
        )
    if torch.cuda.is_initialized():
        raise GruyereError(
            "too late: this process already uses CUDA, and torch can no longer change its "
            "allocator. Call gruyere.enable() at the top of the program, before anything is moved "
            "to the GPU, or launch the program with python -m gruyere or GRUYERE_ENABLE=1"
        )
    reason = _no_device(torch)
    if reason:
        raise NoGpu(reason)


def _no_device(torch: Any) -> Optional[str]:
    """Why there is no CUDA device, or None. Does not initialise CUDA: this process may fork
    children that will."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={visible!r} hides every device"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        # The loader's message, except in the usual case.
        cause = "was not found" if "No such file" in str(error) else f"cannot be loaded: {error}"
        return f"there is no NVIDIA driver here (libcuda.so.1 {cause})"
    # NVML counts devices without CUDA. If the count is negative or torch has no such function, it
    # is not known before CUDA is in use.
    count = getattr(torch.cuda, "_device_count_nvml", lambda: -1)()
    return "the NVIDIA driver shows no device to this process" if count == 0 else None


def _in_bad_fork(torch: Any) -> bool:
    return bool(getattr(torch.cuda, "_is_in_bad_fork", lambda: False)())
