"""Puts Gruyère in the place of torch's allocator."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import sys
import threading
from dataclasses import dataclass
from typing import Any, Optional

from . import (
    _backward_end,
    _blame,
    _library,
    _unsupported,
    _nccl,
    _settings,
    _shim,
    _stand_in,
    _torch_conf,
    _uncaught,
    _waits,
)
from ._errors import GruyereError, NoCuda, NoGpu, warn_once

# Makes child processes do the same; set by `GRUYERE_ENABLE=1 python train.py`.
VARIABLE = "GRUYERE_ENABLE"

# Each hook's setter on torch's allocator object, and our function for it. All exist from torch 2.4
# on.
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
    # By the launch line, not by a call of the program's.
    automatic: bool
    # torch keeps a pointer to the allocator object; this keeps the object.
    allocator: Any
    # torch's door ("native" or "pluggable"), and the reason.
    door: str
    door_reason: str


_lock = threading.Lock()
_enabled: Optional[Enabled] = None
_reason = (
    "gruyere.enable() has not been called; call it before the program uses CUDA, or launch "
    "with python -m gruyere or GRUYERE_ENABLE=1"
)


def enable(**settings: object) -> None:
    """Makes Gruyère the allocator of this process and of the processes that it starts. Call it
    before the program touches CUDA.

    `settings` are keys of GRUYERE_CONF: `enable(limit="90%", share=False)`; they come after those
    of the environment.

    Raises GruyereError, and changes nothing, where it is too late (CUDA is in use), where it has
    been called before with other settings, where there is no CUDA or no library, where torch lacks
    something, and where a setting is wrong. A call that asks for nothing else than an earlier one,
    or than a launch with `python -m gruyere` or GRUYERE_ENABLE=1, does nothing.
    """
    _enable(settings, automatic=False)


def enable_automatically(required: bool) -> None:
    """As the launch line says, once torch is imported. Where there is no CUDA: an error if
    `required`, which the launch line reports (`_launch.main`), else the program goes on."""
    try:
        _enable({}, automatic=True)
    except NoCuda:
        # disable_reason() has the reason. A launcher, a data worker or a node without a GPU has
        # nothing to allocate.
        if required:
            raise


def is_wanted() -> bool:
    """Whether the environment asks for Gruyère.

    Raises GruyereError where it cannot be understood.
    """
    text = os.environ.get(VARIABLE, "").strip().lower()
    if text in ("", "0", "off", "false", "no"):
        return False
    if text in ("1", "on", "true", "yes"):
        return True
    raise GruyereError(f"{VARIABLE}={text}: say 1, or 0")


def is_enabled() -> bool:
    """Whether Gruyère serves this process's CUDA memory."""
    return disable_reason() is None


def door() -> Optional[tuple[str, str]]:
    """By which door torch comes in, "native" or "pluggable", and why; None where Gruyère is not
    enabled."""
    return (_enabled.door, _enabled.door_reason) if _enabled and is_enabled() else None


def disable_reason() -> Optional[str]:
    """Why Gruyère is not enabled, in words for the user; None where it is."""
    torch = sys.modules.get("torch")
    if _enabled is None:
        if torch is None and os.environ.get(VARIABLE) and "gruyere._startup" in sys.modules:
            return "torch has not been imported yet; Gruyère is enabled when it is"
        return _reason
    if torch is not None and _in_bad_fork(torch):
        return (
            "this process was forked from one that uses CUDA, so it cannot use CUDA itself; "
            "start it with the spawn method"
        )
    if _enabled.door == "native" and not _shim.is_current():
        return (
            "something has put another allocator in Gruyère's place since "
            "(torch.cuda.memory.change_current_allocator): leave that out"
        )
    return None


def _enable(settings: dict[str, object], automatic: bool) -> None:
    global _enabled, _reason
    # Before the lock: if the launch line asks for Gruyère, this import enables it.
    torch = _import_torch()
    with _lock:
        if _enabled is not None:
            _check_again(_enabled, settings)
            return
        try:
            _enabled = _swap(torch, settings, automatic)
        except GruyereError as error:
            _reason = str(error)
            raise
    # Children that are started afresh do the same when they import torch.
    os.environ[VARIABLE] = "1"
    if _enabled.door == "pluggable":
        # The native door needs none of these: torch's own numbers are true there.
        _install("_torch_stats")
        _install("_profiler")
    _install("_steps")
    _install("_streams")


def _check_again(before: Enabled, settings: dict[str, object]) -> None:
    """A second call is a mistake, but for one that asks for nothing else: the launch line has
    brought it already, or a notebook's cell runs again."""
    asked = {entry for entry in before.settings.split(",") if entry}
    new = sorted(f"{key}:{_settings.value(key, value)}" for key, value in settings.items())
    missing = [entry for entry in new if entry not in asked]
    if not before.automatic:
        if missing:
            raise GruyereError(
                "gruyere.enable() was called before in this process, with other settings "
                f"({before.settings!r}; now {', '.join(missing)}): one call is enough, "
                "and the first one counts until the process ends; restart it (a notebook: its "
                "kernel) for other settings"
            )
        return
    if missing:
        raise GruyereError(
            f"Gruyère was enabled by the launch line already (settings {before.settings!r}), and "
            f"the program asks for something else ({', '.join(missing)}): set "
            f"{_settings.VARIABLE} there, or launch without Gruyère and let the program enable it"
        )


# Errors of `import torch` if torch is incomplete (without the nvidia packages: ValueError).
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
    limit = _limit(settings)
    whole = _settings.checked({**({"limit": limit} if limit else {}), **settings})
    _check_cuda(torch)
    chosen, why, allocator = _take(torch, whole)
    # The library reads them at the first request, and children at their start.
    os.environ[_settings.VARIABLE] = whole
    _nccl.install(torch, whole)
    _waits.install(torch)
    _blame.install(whole)
    _backward_end.install(torch)
    _uncaught.install(torch)
    said = _torch_conf.line(limit is not None, _shim.counts_rejections(torch, chosen))
    if said:
        _say(said)
    # A dry run says it itself.
    if _stand_in.is_device() and os.environ.get(_stand_in.DRYRUN) != "1":
        _say(
            "the GPU of this process is the stand-in, which keeps books of memory and computes "
            "nothing"
        )
    return Enabled(whole, automatic, allocator, chosen, why)


def _say(line: str) -> None:
    """Once a node: its ranks all find the same."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        warn_once(line)


def _take(torch: Any, settings: str) -> tuple[str, str, Any]:
    """Makes Gruyère torch's allocator: by which door, why, and what is to be kept alive for it."""
    door, why = open_door(torch, settings)
    if door == "native":
        _library.library().gruyere_announce_hooks(_ALL_HOOKS)
        _unsupported.install(torch, native=True)
        return door, why, None
    if not why.startswith("door:"):
        _say(f"{why}. The pluggable door serves (door:pluggable says nothing)")
    allocator = _pluggable(torch)
    _library.library().gruyere_announce_hooks(_ALL_HOOKS)
    _unsupported.install(torch)
    return "pluggable", why, allocator


def open_door(torch: Any, settings: str) -> tuple[str, str]:
    """By which door torch comes in with these settings, and why. The native one is in place then,
    which needs no GPU."""
    wanted = _settings.entries(settings).get("door", "auto")
    if wanted != "pluggable":
        try:
            _shim.install(torch)
        except _shim.Unavailable as error:
            return "pluggable", f"there is no native door here: {error}"
        return "native", f"door:{wanted}"
    return "pluggable", f"door:{wanted}"


def _pluggable(torch: Any) -> Any:
    allocator = torch._C._cuda_customAllocator(
        _library.address("gruyere_malloc"), _library.address("gruyere_free")
    )
    missing = [setter for setter in _HOOKS if not hasattr(allocator, setter)]
    if missing:
        raise _too_old(torch, missing)
    for setter, function in _HOOKS.items():
        getattr(allocator, setter)(_library.address(function))
    try:
        torch._C._cuda_changeCurrentAllocator(allocator)
    except RuntimeError as error:
        raise GruyereError(
            f"torch refuses another allocator ({str(error).splitlines()[0]}): something has "
            "put one in place before; enable Gruyère first,"
            " and only Gruyère"
        ) from error
    return allocator


def _limit(settings: dict[str, object]) -> Optional[str]:
    """torch's memory fraction as our limit, where nobody has set one of ours."""
    ours = _settings.keys(os.environ.get(_settings.VARIABLE, "")) | set(settings)
    return None if "limit" in ours else _torch_conf.limit()


def takes_limit(settings: dict[str, object]) -> bool:
    """Whether torch's memory fraction becomes our limit with these settings of a call's."""
    return _limit(settings) is not None


def _check_torch(torch: Any) -> None:
    if getattr(torch.version, "hip", None):
        raise NoCuda(
            "this torch is built for ROCm, and Gruyère manages CUDA memory: install a torch "
            "that is built for CUDA"
        )
    if torch.version.cuda is None:
        raise NoCuda(
            f"this torch ({torch.__version__}) is built without CUDA: install one that is "
            "built with it"
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
            "too late: this process uses CUDA already, and torch cannot change its allocator "
            "any more. Call gruyere.enable() at the top of"
            " the program, before anything is moved to the GPU, or launch it with python -m "
            "gruyere or GRUYERE_ENABLE=1"
        )
    reason = _no_device(torch)
    if reason:
        raise NoGpu(reason)


def _no_device(torch: Any) -> Optional[str]:
    """Why there is no CUDA device. Asked without initialising CUDA: this process may fork children
    that will."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={visible!r} hides every device"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        # The loader's words, but for the usual case.
        cause = "was not found" if "No such file" in str(error) else f"cannot be loaded: {error}"
        return f"there is no NVIDIA driver here (libcuda.so.1 {cause})"
    # NVML counts without CUDA; below 0, and if torch has no such function, the count is not known
    # before CUDA is in use.
    count = getattr(torch.cuda, "_device_count_nvml", lambda: -1)()
    return "the NVIDIA driver shows no device to this process" if count == 0 else None


def _in_bad_fork(torch: Any) -> bool:
    return bool(getattr(torch.cuda, "_is_in_bad_fork", lambda: False)())


def _install(part: str) -> None:
    """Lets another part of the package put its changes to torch in place."""
    name = f"{__package__}.{part}"
    if importlib.util.find_spec(name):
        importlib.import_module(name).install()
