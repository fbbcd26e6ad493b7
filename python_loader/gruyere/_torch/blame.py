"""Allocation sites (`blame:`): what the library cannot find out by itself.

The library reads the frames of the allocating thread. This module reports the rest to it: that the
package is in use (which turns `blame:auto` on), the code object that calls modules, the name of
each module in its parent, that an optimiser was created, the numbers of a notebook's cells, and
that the interpreter exits.
"""

from __future__ import annotations

import atexit
import contextvars
import ctypes
import functools
import sys
import weakref
from typing import TYPE_CHECKING, Any, Callable, Optional

from .._native import conf, library

if TYPE_CHECKING:
    import torch

# By a module's address: a weak reference whose callback removes the module's name.
_known: dict[int, weakref.ref[Any]] = {}
# Objects whose addresses the library compares; they must live as long as the process.
_kept: list[Any] = []
# The number of the notebook's cell that runs. None: what runs is no cell.
_cell: contextvars.ContextVar[Optional[int]] = contextvars.ContextVar("_cell", default=None)


def install(settings: str) -> None:
    """Let the library read the sites of requests, unless `settings` turn that off. Called by
    enable(), before CUDA is used."""
    if conf.entries(settings).get("blame", "auto") == "off":
        return
    import torch
    from torch.nn.modules import module

    call = getattr(torch.nn.Module.__call__, "__code__", None)
    _kept.append(call)
    # With the GIL held: the library compares its own reading with Python's answers.
    begin = _holding_the_lock("gruyere_blame_begin", ctypes.c_void_p)
    if begin(id(call) if call else None) != 0:
        return
    atexit.register(library.load().gruyere_blame_end)
    global _tell, _forget
    _tell = _holding_the_lock(
        "gruyere_blame_module", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p
    )
    _forget = _holding_the_lock("gruyere_blame_forget", ctypes.c_void_p)
    module.register_module_module_registration_hook(_registered)
    for kind in (torch.nn.Module, torch.nn.RNNBase):
        kind._apply = _moving(kind._apply)
    cell = _holding_the_lock("gruyere_blame_cell", ctypes.c_char_p, ctypes.c_uint32)
    _name_cells(lambda name, number: cell(name.encode(errors="replace"), number))
    made = library.load().gruyere_blame_optimizer
    torch.optim.Optimizer.__init__ = _telling(torch.optim.Optimizer.__init__, made)


def _name_cells(tell: Callable[[str, int], object]) -> None:
    """In a notebook: report the number of each cell that has run, and of those to come. IPython
    compiles a cell under a file name of its own making, and keeps the cell's number beside it."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    compiler = getattr(shell, "compile", None)
    numbers = getattr(compiler, "_filename_map", None)
    cache = getattr(compiler, "cache", None)
    if not isinstance(numbers, dict) or cache is None:
        return

    def report(name: Any, number: Any) -> None:
        if isinstance(name, str) and isinstance(number, int):
            tell(name, number)

    for name, number in list(numbers.items()):
        report(name, number)
    follows = _follow_cells(shell)

    @functools.wraps(cache)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        name = cache(*args, **kwargs)
        report(name, _cell.get() if follows else numbers.get(name))
        return name

    compiler.cache = wrapper


def _follow_cells(shell: Any) -> bool:
    """Note which cell runs. IPython compiles also what a cell runs by `%%capture` or
    `get_ipython().run_cell`, and what a frontend runs unseen; without a place in the history, that
    has the number of the next cell (since IPython 9). It is of the cell that runs it, or of none.
    Returns False if that can't be followed."""
    original = getattr(shell, "run_cell_async", None)
    if original is None:
        return False

    @functools.wraps(original)
    async def run(
        raw_cell: str, store_history: bool = False, silent: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        number = shell.execution_count if store_history and not silent else _cell.get()
        before = _cell.get()
        _cell.set(number)
        try:
            return await original(raw_cell, store_history, silent, *args, **kwargs)
        finally:
            # Not by a token: a cell that is ended from outside may be in another context by then.
            _cell.set(before)

    shell.run_cell_async = run
    return True


def _telling(make: Callable[..., None], tell: Callable[[], object]) -> Callable[..., None]:
    """Wrap `Optimizer.__init__` to report that there is an optimiser. Then forwards without a
    backward so far are not taken for inference without torch.no_grad()."""

    @functools.wraps(make)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        tell()
        make(*args, **kwargs)

    return wrapper


def _holding_the_lock(name: str, *arguments: Any) -> Callable[..., int]:
    """The library's function `name`, which is short, to be called with the GIL held."""
    return ctypes.PYFUNCTYPE(ctypes.c_int, *arguments)(library.address(name))


def _unset(*arguments: Any) -> int:
    return 0


_tell: Callable[..., int] = _unset
_forget: Callable[..., int] = _unset


def _registered(outer: torch.nn.Module, name: str, inner: Any) -> None:
    """Hook: a module is registered as a submodule of another."""
    import torch

    # A compiler traces this too, where a function makes a module.
    if inner is not None and not torch.compiler.is_compiling():
        _name(inner, outer, name)


def _name(inner: torch.nn.Module, outer: torch.nn.Module, name: str) -> None:
    if id(outer) not in _known:
        _add(outer)
    if id(inner) not in _known:
        _add(inner)
    _tell(id(inner), id(outer), name.encode(errors="replace"))
    _name_inside(inner)


def _name_inside(module: torch.nn.Module) -> None:
    """Name the unknown submodules of `module`: a copy has submodules that were never
    registered."""
    for name, child in module._modules.items():
        if child is not None and id(child) not in _known:
            _name(child, module, name)


def _add(module: torch.nn.Module) -> None:
    address = id(module)
    try:
        _known[address] = weakref.ref(module, functools.partial(_gone, address))
    except TypeError:
        # No weak reference: its deletion would go unnoticed.
        return
    _tell(address, None, type(module).__name__.encode(errors="replace"))


def _gone(address: int, _: Any) -> None:
    _known.pop(address, None)
    _forget(address)


def _moving(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Module._apply` to name modules that were copied or loaded as a whole: it moves them to
    the device, and calls itself for the submodules."""

    @functools.wraps(apply)
    def wrapper(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        import torch

        if not torch.compiler.is_compiling():
            if id(module) not in _known:
                _add(module)
            _name_inside(module)
        return apply(module, *args, **kwargs)

    return wrapper
