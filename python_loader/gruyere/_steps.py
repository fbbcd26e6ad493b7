"""Steps and lifetimes without a change to the program: hooks of torch's optimisers and modules.

What is known is counted (`tag`), and places nothing: memory is placed among others of its lifetime
only where the program says so.
- When a module has moved to the device (`Module._apply`, under `to`, `cuda`, `half`), its
  parameters and buffers are persistent; when it gets one that was made on the device, that one is.
- When an optimiser has stepped, all that it has is: its parameters, and what is in
  `optimizer.state`.
- A step is over when an optimiser has stepped. Of several that step in turn, one marks.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from typing import TYPE_CHECKING, Any, Callable, Optional

from . import _library
from ._errors import warn_once
from ._lifetimes import tag

if TYPE_CHECKING:
    import torch

_lock = threading.Lock()
_installed = False
# The program marks its steps itself.
_explicit = False
# The latest mark was an optimiser's.
_automatic = False

# Optimisers are searched after each of so many first steps; then only when they have more.
_FIRST_STEPS = 3


def step() -> None:
    """Marks the end of a step: of training, or a request of a server. Steps of optimisers are
    marked without it; once a program calls this, only by it."""
    global _explicit, _automatic
    # The first time, an optimiser may just have marked the same step.
    again, _explicit, _automatic = _automatic, True, False
    if not again:
        _mark()


def _mark() -> None:
    _library.library().gruyere_mark_step()


def checkpoint() -> int:
    """Says that memory is low now (a checkpoint is written, an epoch is over): gives idle memory
    back to the device if less than three quarters of the peak is live, and no oftener than every 30
    seconds. The bytes given. `torch.save` does this by itself."""
    function = _library.library().gruyere_checkpoint
    function.restype = ctypes.c_uint64
    return int(function())


def install() -> None:
    """Puts the hooks in place, once. Called by enable()."""
    global _installed
    import torch
    from torch.nn.modules import module
    from torch.optim import optimizer

    with _lock:
        if _installed:
            return
        _installed = True
    optimizer.register_optimizer_step_post_hook(_after_step)
    # cuDNN's recurrent layers move once more, into one flat block.
    for kind in (torch.nn.Module, torch.nn.RNNBase):
        kind._apply = _moving(kind._apply)
    module.register_module_parameter_registration_hook(_registered)
    module.register_module_buffer_registration_hook(_registered)
    torch.save = _saving(torch.save)
    torch.serialization.save = _saving(torch.serialization.save)


class _Leader:
    """Which of the optimisers marks the steps of the program.

    The first one, until it is gone, or until another has stepped twice since it did: then that one.
    So several that take turns (of a generator and its discriminator, of each layer, one inside
    another) make one step, not several.
    """

    def __init__(self) -> None:
        self._leader: Optional[weakref.ref[Any]] = None
        self._others: set[int] = set()

    def stepped(self, optimizer: Any) -> bool:
        """`optimizer` has stepped: whether a step of the program is over."""
        leader = self._leader() if self._leader else None
        if leader is not None and leader is not optimizer and id(optimizer) not in self._others:
            self._others.add(id(optimizer))
            return False
        self._leader = weakref.ref(optimizer)
        self._others.clear()
        return True


_leader = _Leader()
# By optimiser: the number of searches, and its contents at the last.
_known: weakref.WeakKeyDictionary[Any, tuple[int, tuple[int, ...]]] = weakref.WeakKeyDictionary()


def _harmless(hook: Callable[[Any], None]) -> Callable[[Any, Any, Any], None]:
    """`hook` as an optimiser's: whatever an optimiser that we do not know makes of it, the program
    goes on, and is told once."""

    @functools.wraps(hook)
    def harmless(optimizer: Any, args: Any, kwargs: Any) -> None:
        try:
            hook(optimizer)
        except Exception as error:
            kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
            warn_once(
                f"the steps and states of {kind} cannot be followed ({error!r}): mark them "
                "with gruyere.step() and gruyere.lifetime()"
            )

    return harmless


@_harmless
def _after_step(optimizer: torch.optim.Optimizer) -> None:
    _tag_states(optimizer)
    global _automatic
    if _leader.stepped(optimizer) and not _explicit:
        _automatic = True
        _mark()


def _tag_states(optimizer: torch.optim.Optimizer) -> None:
    groups = optimizer.param_groups
    # load_state_dict brings new dicts.
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
    """`Module._apply`, after which what this module has is persistent. It calls itself for the
    modules inside."""

    @functools.wraps(apply)
    def wrapper(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        moved = apply(module, *args, **kwargs)
        # A compiler that looks through this must see the wrapped function.
        if not _is_compiling():
            tag([*module._parameters.values(), *module._buffers.values()])
        return moved

    return wrapper


def _is_compiling() -> bool:
    import torch

    return bool(torch.compiler.is_compiling())


def _registered(owner: torch.nn.Module, name: str, value: Any) -> None:
    """A module gets a parameter or a buffer."""
    import torch

    if isinstance(value, torch.Tensor):
        tag(value)


def _saving(function: Callable[..., Any]) -> Callable[..., Any]:
    if hasattr(function, "_gruyere"):
        return function

    @functools.wraps(function)
    def save(*args: Any, **kwargs: Any) -> Any:
        checkpoint()
        return function(*args, **kwargs)

    save._gruyere = True  # type: ignore[attr-defined]
    return save
