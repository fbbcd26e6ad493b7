"""Where in the program memory comes from (`blame:`): what the library cannot find out by itself.

It reads the frames of the thread that allocates. Told from here are that there is a package (which
turns `blame:auto` on), which code calls modules, what each module is called by the one that it is
in, that an optimiser was made, and that the interpreter ends.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import weakref
from typing import TYPE_CHECKING, Any, Callable

from . import _library, _settings

if TYPE_CHECKING:
    import torch

# By the module's address: a weak reference that withdraws its name.
_known: dict[int, weakref.ref[Any]] = {}
# Objects whose addresses the library compares must live as long as the process.
_kept: list[Any] = []


def install(settings: str) -> None:
    """Lets the library read where requests come from, unless `settings` say that it is not to.
    Called by enable(), before CUDA is used."""
    if _settings.entries(settings).get("blame", "auto") == "off":
        return
    import torch
    from torch.nn.modules import module

    call = getattr(torch.nn.Module.__call__, "__code__", None)
    _kept.append(call)
    # With the interpreter's lock: the library compares its own reading with Python's answers.
    begin = _holding_the_lock("gruyere_blame_begin", ctypes.c_void_p)
    if begin(id(call) if call else None) != 0:
        return
    atexit.register(_library.library().gruyere_blame_end)
    global _tell, _forget
    _tell = _holding_the_lock(
        "gruyere_blame_module", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p
    )
    _forget = _holding_the_lock("gruyere_blame_forget", ctypes.c_void_p)
    module.register_module_module_registration_hook(_registered)
    for kind in (torch.nn.Module, torch.nn.RNNBase):
        kind._apply = _moving(kind._apply)
    made = _library.library().gruyere_blame_optimizer
    torch.optim.Optimizer.__init__ = _telling(torch.optim.Optimizer.__init__, made)


def _telling(make: Callable[..., None], tell: Callable[[], object]) -> Callable[..., None]:
    """`Optimizer.__init__`, which says that there is one: forwards that wait for their backward
    are then no inference that forgot torch.no_grad()."""

    @functools.wraps(make)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        tell()
        make(*args, **kwargs)

    return wrapper


def _holding_the_lock(name: str, *arguments: Any) -> Callable[..., int]:
    """The library's function `name`, which is quick, called without letting go of the lock."""
    return ctypes.PYFUNCTYPE(ctypes.c_int, *arguments)(_library.address(name))


def _unset(*arguments: Any) -> int:
    return 0


_tell: Callable[..., int] = _unset
_forget: Callable[..., int] = _unset


def _registered(outer: torch.nn.Module, name: str, inner: Any) -> None:
    """A module gets another."""
    if inner is not None:
        _name(inner, outer, name)


def _name(inner: torch.nn.Module, outer: torch.nn.Module, name: str) -> None:
    if id(outer) not in _known:
        _add(outer)
    if id(inner) not in _known:
        _add(inner)
    _tell(id(inner), id(outer), name.encode(errors="replace"))
    _name_inside(inner)


def _name_inside(module: torch.nn.Module) -> None:
    """The modules in `module` that are not known: a copy has some that nobody registered."""
    for name, child in module._modules.items():
        if child is not None and id(child) not in _known:
            _name(child, module, name)


def _add(module: torch.nn.Module) -> None:
    address = id(module)
    try:
        _known[address] = weakref.ref(module, functools.partial(_gone, address))
    except TypeError:
        # Its end would go unnoticed.
        return
    _tell(address, None, type(module).__name__.encode(errors="replace"))


def _gone(address: int, _: Any) -> None:
    _known.pop(address, None)
    _forget(address)


def _moving(apply: Callable[..., Any]) -> Callable[..., Any]:
    """`Module._apply`, which is how a module that was copied or loaded whole comes to the device:
    it calls itself for the modules inside."""

    @functools.wraps(apply)
    def wrapper(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        import torch

        if not torch.compiler.is_compiling():
            if id(module) not in _known:
                _add(module)
            _name_inside(module)
        return apply(module, *args, **kwargs)

    return wrapper
