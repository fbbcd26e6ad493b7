"""Lifetimes of memory: those that the program declares, and tags on the memory of tensors."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from functools import lru_cache
from types import TracebackType
from typing import TYPE_CHECKING, Any, Callable, Optional

from ._errors import GruyereError
from ._native import library

if TYPE_CHECKING:
    import torch

# The C interface's numbers.
NUMBERS = {"auto": 0, "transient": 1, "step": 2, "persistent": 3}
PERSISTENT = NUMBERS["persistent"]


@lru_cache(maxsize=None)
def _functions() -> tuple[Callable[[int], int], Callable[[], int], Callable[[int, int], int]]:
    lib = library.load()
    push, pop, tag = (
        lib.gruyere_lifetime_push,
        lib.gruyere_lifetime_pop,
        lib.gruyere_tag,
    )
    push.argtypes, push.restype = [ctypes.c_uint8], ctypes.c_int
    pop.argtypes, pop.restype = [], ctypes.c_int
    tag.argtypes, tag.restype = [ctypes.c_void_p, ctypes.c_uint8], ctypes.c_int
    return push, pop, tag


class lifetime(contextlib.ContextDecorator):
    """Declare how long the memory that this thread allocates will live.

        with gruyere.lifetime("persistent"):
            cache = torch.empty(...)

    Blocks of different lifetimes do not share pages. Lifetimes: "transient" for workspaces, "step"
    for activations and gradients, "persistent" for weights and optimiser states, "auto" for no
    declaration.

    Contexts nest up to 31 deep, and the innermost one counts. Can also be used as a decorator. It
    applies to the calling thread only, not to backward passes, which run on autograd's threads.

    Raises GruyereError if there is no such lifetime.
    """

    def __init__(self, name: str) -> None:
        number = NUMBERS.get(name)
        if number is None:
            raise GruyereError(
                f"lifetime({name!r}): expected one of {', '.join(map(repr, NUMBERS))}"
            )
        self.name = name
        self._number = number

    def __enter__(self) -> lifetime:
        if _functions()[0](self._number) != 0:
            raise GruyereError(
                f"lifetime({self.name!r}): 31 lifetimes are already open on this thread; does a "
                "loop enter one and never leave it?"
            )
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        _functions()[1]()

    def __repr__(self) -> str:
        return f"gruyere.lifetime({self.name!r})"


def tag(tensors: Any, number: int = PERSISTENT) -> int:
    """Count the live memory of `tensors` (a tensor, or lists, tuples, sets and dicts of tensors,
    nested to any depth) under the lifetime `number`. Returns the number of blocks tagged; skips
    tensors on other devices, and memory that is not ours."""
    mark = _functions()[2]
    return sum(
        mark(address, number) == 0
        for address in {_address(tensor) for tensor in _tensors(tensors)}
        if address
    )


def _tensors(things: Any) -> Iterator[torch.Tensor]:
    """The plain tensors in `things`; wrappers (DTensor and the like) are replaced by the tensors
    inside them."""
    import torch

    waiting, seen = [things], set()
    while waiting:
        thing = waiting.pop()
        if isinstance(thing, torch.Tensor):
            flatten = getattr(thing, "__tensor_flatten__", None)
            if flatten is None:
                yield thing
                continue
            # A wrapper that is not complete yet may raise anything.
            with contextlib.suppress(Exception):
                waiting.extend([getattr(thing, name) for name in flatten()[0]])
        elif isinstance(thing, (dict, list, tuple, set)) and id(thing) not in seen:
            seen.add(id(thing))
            waiting.extend(thing.values() if isinstance(thing, dict) else thing)


def _address(tensor: torch.Tensor) -> int:
    """The address of a CUDA tensor's storage; 0 for other tensors and for those without memory."""
    import torch

    try:
        # A subclass or a mode of the program's must not see these calls.
        with torch._C.DisableTorchFunction():
            # Not data_ptr(), which copies the memory of a lazy clone.
            return int(torch._C._data_address(tensor)) if tensor.is_cuda else 0
    except Exception:
        # Sparse tensors, and subclasses without memory.
        return 0
