"""Masks that a program sets at places which kernels find: `mask[places] = 1`, as a detector's
samplers do. Which elements are set is known to the device alone, but not more than there are
places: so a sampler's 512 boxes are 512, not all that there are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Optional

from .computed import Computed
from .functions import Functions
from .identity import ByIdentity

# Functions whose result has as many elements set as the tensors of a list together, as their two
# operands together, or as their operand.
_LISTS = ("cat", "concat", "stack")
_TWO = ("__or__", "bitwise_or", "logical_or")
_SAME = ("to", "bool", "clone")


class Most:
    def __init__(self, computed: Computed) -> None:
        self.computed = computed
        # By mask: its version then, and how many elements are set at most.
        self.noted: ByIdentity[tuple[int, int]] = ByIdentity()

    def watch(self, torch: Any, functions: Functions) -> None:
        """Replace torch's functions, after `computed` has."""
        self.torch = torch
        functions.replace("__setitem__", self._setting)
        for names, operands in (
            (_LISTS, lambda arguments: arguments[0]),
            (_TWO, lambda arguments: arguments[:2]),
            (_SAME, lambda arguments: arguments[:1]),
        ):
            for name in names:
                functions.replace(name, functools.partial(self._together, operands))

    def of(self, mask: Any) -> Optional[int]:
        """How many elements of a mask are not zero at most; None if that is not known."""
        noted = self.noted.get(mask)
        if noted is not None and noted[0] == mask._version:
            return noted[1]
        places = self.computed.places(mask)
        return None if places is None else len(places)

    def _setting(self, original: Any, *arguments: Any, **options: Any) -> Any:
        mask, index = arguments[:2]
        if not mask.is_cuda or not self._are_places(index) or mask.is_floating_point():
            return original(*arguments, **options)
        before = self.of(mask)
        result = original(*arguments, **options)
        if before is not None:
            row = mask.numel() // max(1, mask.shape[0])
            self._note(mask, before + index.numel() * row)
        return result

    def _are_places(self, index: Any) -> bool:
        return self.torch.is_tensor(index) and index.dtype in (self.torch.int64, self.torch.int32)

    def _together(
        self, operands: Callable[[Any], Any], original: Any, *arguments: Any, **options: Any
    ) -> Any:
        result = original(*arguments, **options)
        if not self.noted or not arguments or not getattr(result, "is_cuda", False):
            return result
        masks = operands(arguments)
        if any(mask in self.noted and mask is not result for mask in masks):
            most = [self.of(mask) if self.torch.is_tensor(mask) else None for mask in masks]
            sizes = [mask.numel() for mask in masks if self.torch.is_tensor(mask)]
            # An element of an operand is one of the result: nothing is broadcast.
            is_whole = result.numel() == sum(sizes) or set(sizes) == {result.numel()}
            if is_whole and None not in most and not self.computed.knows(result):
                self._note(result, sum(one or 0 for one in most))
        return result

    def _note(self, mask: Any, most: int) -> None:
        try:
            self.noted[mask] = mask._version, min(most, mask.numel())
        except RuntimeError:
            # Tensors made in inference mode have no version.
            pass
