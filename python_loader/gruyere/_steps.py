"""Steps and lifetimes detected without changes to the program, by hooks on torch's optimisers and
modules.

A detected lifetime is only counted (`tag`) and places nothing: only lifetimes that the program
declares decide where memory lies.
- When a module has moved to the device (`Module._apply`, called by `to`, `cuda`, `half`), its
  parameters and buffers are persistent; so is one that was made on the device, once a module gets
  it, or is copied or unpickled with it (`Module.__setstate__`).
- When an optimiser has stepped, its parameters and the tensors in `optimizer.state` are persistent.
- A step ends when an optimiser has stepped. If several take turns, one of them marks the step.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
import weakref
from typing import TYPE_CHECKING, Any, Callable, Optional

from ._errors import warn_once
from ._imports import when_imported
from ._lifetimes import tag
from ._native import library

if TYPE_CHECKING:
    import torch

_lock = threading.Lock()
_installed = False
# The program marks its steps itself.
_explicit = False
# The latest mark was made by an optimiser.
_automatic = False

# An optimiser is searched after each of its first steps, later only when its contents change.
_FIRST_STEPS = 3


def step() -> None:
    """Mark the end of a step: a training step, or a request to a server.

    Optimiser steps are marked automatically. Once the program calls this function, only its own
    calls mark steps.
    """
    global _explicit, _automatic
    # The first time, an optimiser may just have marked the same step.
    again, _explicit, _automatic = _automatic, True, False
    if not again:
        _mark()


def _mark() -> None:
    library.load().gruyere_mark_step()


def checkpoint() -> int:
    """Declare a moment of low memory, such as the writing of a checkpoint or the end of an epoch.

    Releases idle memory to the device if less than three quarters of the peak is live, at most once
    every 30 seconds. Returns the number of bytes released. `torch.save` calls it.
    """
    function = library.load().gruyere_checkpoint
    function.restype = ctypes.c_uint64
    return int(function())


def install() -> None:
    """Install the hooks, once. Called by enable()."""
    global _installed
    import torch
    from torch.nn.modules import module
    from torch.optim import optimizer

    with _lock:
        if _installed:
            return
        _installed = True
    hook = optimizer.register_optimizer_step_post_hook(_after_step)

    def untraced(_: Any) -> None:
        # A compiled function that calls a step would compile the hook, too, frame by frame. In
        # its place: hooks may be running now.
        hooks = hook.hooks_dict_ref()
        if hooks is not None and hook.id in hooks:
            hooks[hook.id] = torch.compiler.disable(_after_step)

    when_imported("torch._dynamo", untraced)
    optimizer.Optimizer.load_state_dict = _resuming(optimizer.Optimizer.load_state_dict)
    # Recurrent layers for cuDNN move once more, into one flat block.
    for kind in (torch.nn.Module, torch.nn.RNNBase):
        kind._apply = _moving(kind._apply)
    torch.nn.Module.__setstate__ = _restoring(torch.nn.Module.__setstate__)
    module.register_module_parameter_registration_hook(_registered)
    module.register_module_buffer_registration_hook(_registered)
    # One function under both names, which is pickled by the second one.
    before, saving = torch.serialization.save, _saving(torch.serialization.save)
    torch.save = saving if torch.save is before else _saving(torch.save)
    torch.serialization.save = saving


class _Leader:
    """The optimiser that marks the program's steps.

    It is the first optimiser to step, until it is gone or another one has stepped twice since its
    last step; then the other one takes over. So several optimisers that take turns (a generator's
    and its discriminator's, one per layer, one inside another) make one step, not several.
    """

    def __init__(self) -> None:
        self._leader: Optional[weakref.ref[Any]] = None
        self._others: set[int] = set()

    def stepped(self, optimizer: Any) -> bool:
        """Note that `optimizer` has stepped. Returns whether a step of the program is over."""
        leader = self._leader() if self._leader else None
        if leader is not None and leader is not optimizer and id(optimizer) not in self._others:
            self._others.add(id(optimizer))
            return False
        self._leader = weakref.ref(optimizer)
        self._others.clear()
        return True


_leader = _Leader()
# For each optimiser, the number of searches and its contents at the last one.
_known: weakref.WeakKeyDictionary[Any, tuple[int, tuple[int, ...]]] = weakref.WeakKeyDictionary()


def _harmless(hook: Callable[[Any], None]) -> Callable[[Any, Any, Any], None]:
    """Wrap an optimiser hook so that an error in it (with an unusual optimiser) becomes one warning
    and the program goes on."""

    @functools.wraps(hook)
    def harmless(optimizer: Any, args: Any, kwargs: Any) -> None:
        try:
            hook(optimizer)
        except Exception as error:
            kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
            warn_once(
                f"Gruyère cannot follow the steps and states of {kind} ({error!r}): mark them "
                "with gruyere.step() and gruyere.lifetime()"
            )

    return harmless


@_harmless
def _loaded(optimizer: torch.optim.Optimizer) -> None:
    tag(optimizer.state)


@_harmless
def _after_step(optimizer: torch.optim.Optimizer) -> None:
    _tag_states(optimizer)
    global _automatic
    if _leader.stepped(optimizer) and not _explicit:
        _automatic = True
        _mark()


def _resuming(load: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Optimizer.load_state_dict` so that the loaded states are tagged before the first step.
    They may lie where a checkpoint was loaded, with tensors that are no states."""

    @functools.wraps(load)
    def wrapper(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        loaded = load(optimizer, *args, **kwargs)
        _loaded(optimizer, args, kwargs)
        return loaded

    return wrapper


def _tag_states(optimizer: torch.optim.Optimizer) -> None:
    groups = optimizer.param_groups
    # load_state_dict replaces the dicts.
    has = (
        id(optimizer.state),
        len(optimizer.state),
        len(groups),
        sum(len(group["params"]) for group in groups),
    )
    times, before = _known.get(optimizer, (0, ()))
    if times >= _FIRST_STEPS and before == has:
        return
    _known[optimizer] = (times + 1 if before == has else 1, has)
    tag([group["params"] for group in groups])
    tag(optimizer.state)


def _moving(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Module._apply` so that the module's tensors are tagged as persistent afterwards. It
    calls itself for the submodules."""

    @functools.wraps(apply)
    def wrapper(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        moved = apply(module, *args, **kwargs)
        # A compiler that traces this must see the wrapped function only.
        if not _is_compiling():
            _count([*module._parameters.values(), *module._buffers.values()])
        return moved

    return wrapper


def _restoring(restore: Callable[..., None]) -> Callable[..., None]:
    """Wrap `Module.__setstate__`, which fills a module that was copied (deepcopy) or unpickled
    (torch.load), and registers nothing."""

    @functools.wraps(restore)
    def wrapper(module: torch.nn.Module, state: Any) -> None:
        restore(module, state)
        _count([vars(module).get(kind) for kind in ("_parameters", "_buffers")])

    return wrapper


def _is_compiling() -> bool:
    import torch

    return bool(torch.compiler.is_compiling())


def _registered(owner: torch.nn.Module, name: str, value: Any) -> None:
    """Hook: a parameter or a buffer is registered with a module."""
    # A compiler traces this too, where a forward assigns a buffer.
    if not _is_compiling():
        _count(value)


def _count(tensors: Any) -> None:
    """Tag `tensors` as persistent, if that is possible: a tensor of an unusual class counts as
    before, and the program goes on."""
    with contextlib.suppress(Exception):
        tag(tensors)


def _saving(function: Callable[..., Any]) -> Callable[..., Any]:
    if hasattr(function, "_gruyere"):
        return function

    @functools.wraps(function)
    def save(*args: Any, **kwargs: Any) -> Any:
        checkpoint()
        return function(*args, **kwargs)

    save._gruyere = True  # type: ignore[attr-defined]
    return save
