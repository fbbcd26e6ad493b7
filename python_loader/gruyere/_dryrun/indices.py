"""Operators that compute indices: argmax, topk, multinomial, randint. What a program reads of their
results is within their limits, as no other number on the device is: an environment on the host
takes the action then, and a table has the row."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Optional

from .floats import LARGEST, are_random

# Operators whose result, or the last of several, has places along a dimension. The number of the
# dimension's argument, and whether they have such a result only where it is given.
_ALONG = {
    "argmax": (1, False), "argmin": (1, False), "argsort": (1, False), "sort": (1, False),
    "mode": (1, False), "topk": (2, False), "kthvalue": (2, False),
    "max": (1, True), "min": (1, True), "median": (1, True), "nanmedian": (1, True),
}  # fmt: skip
# Of these, those that look at all elements as one row where no dimension is given.
_FLAT = ("argmax", "argmin")


class Indices:
    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.is_random = are_random()
        self.limit = getattr(ctypes.CDLL(None), "phantom_limit", None)
        if self.limit is not None:
            address, number = ctypes.c_uint64, ctypes.c_int64
            self.limit.argtypes = [address, address, ctypes.c_uint32, number, number]
            self.limit.restype = None

    def watch(self, replace: Callable[[str, Callable[..., Any]], None]) -> None:
        """Install the hooks by `replace`, which takes a function's name and what stands for it."""
        if self.limit is None:
            return
        for name, (place, is_asked) in _ALONG.items():
            replace(name, self._along(name, place, is_asked))
        replace("multinomial", self._drawn)
        replace("randint", self._between)
        replace("randperm", self._permuted)

    def _along(self, name: str, place: int, is_asked: bool) -> Callable[..., Any]:
        def call(original: Any, *arguments: Any, **options: Any) -> Any:
            result = original(*arguments, **options)
            last = result[-1] if isinstance(result, tuple) else result
            if is_asked and last is result or not self._is_of_device(last):
                return result
            of = arguments[0] if arguments else options.get("input")
            dim = options.get("dim", arguments[place] if len(arguments) > place else None)
            if of.dim() == 0 or (dim is None and name in _FLAT):
                self._set(last, 0, of.numel())
            elif dim is None or isinstance(dim, int):
                self._set(last, 0, of.size(-1 if dim is None else dim))
            return result

        return call

    def _drawn(self, original: Any, *arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        if self._is_of_device(result):
            of = arguments[0] if arguments else options["input"]
            self._set(result, 0, of.size(-1))
        return result

    def _between(self, original: Any, *arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        if self._is_of_device(result):
            # The limits may be one or two, before the size.
            numbers = [one for one in arguments[:2] if isinstance(one, int)]
            named = [options[name] for name in ("low", "high") if name in options]
            low, high = ([0, *numbers, *named])[-2:]
            self._set(result, low, high)
        return result

    def _permuted(self, original: Any, *arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        if self._is_of_device(result):
            self._set(result, 0, result.numel())
        return result

    def _is_of_device(self, result: Any) -> bool:
        # Subclasses may have no memory.
        return type(result) is self.torch.Tensor and result.is_cuda

    def _set(self, result: Any, low: int, high: int) -> None:
        """What is read of `result` is from `low` to `high`, less one."""
        are_within = low <= 0 and (high > LARGEST if self.is_random else high > 0)
        if are_within or result.is_floating_point() or result.is_complex():
            return
        memory, width = result.untyped_storage(), result.element_size()
        # Not where the program has given the memory, with what else is in it.
        if memory.nbytes() == result.numel() * width:
            self.limit(memory.data_ptr(), memory.nbytes(), width, low, high)
