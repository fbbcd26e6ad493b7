"""Masks that a program sets at places which kernels find: `mask[places] = 1`, as a detector's
samplers do. Which elements are set is known to the device alone, but not more than there are
places: so a sampler's 512 boxes are 512, not all that there are."""

from __future__ import annotations

from typing import Any, Optional

from .computed import Computed
from .functions import Functions
from .identity import ByIdentity

# Functions whose result has as many elements set as their operands together, or as their operand.
_TOGETHER = ("cat", "concat", "stack", "__or__", "bitwise_or", "logical_or")
_SAME = ("to", "bool", "clone", "detach", "flatten", "reshape", "view", "squeeze", "unsqueeze")


class Most:
    def __init__(self, computed: Computed) -> None:
        self.computed = computed
        # By mask: its version then, and how many elements are set at most.
        self.noted: ByIdentity[tuple[int, int]] = ByIdentity()

    def watch(self, torch: Any, functions: Functions) -> None:
        """Replace torch's functions, after `computed` has."""
        self.torch = torch
        functions.replace("__setitem__", self._setting)
        for name in (*_TOGETHER, *_SAME):
            functions.replace(name, self._together)

    def of(self, mask: Any) -> Optional[int]:
        """How many elements of a mask are not zero at most; None if that is not known."""
        version, most = self.noted.get(mask) or (None, 0)
        if version is not None and version == mask._version:
            return most
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
            self.noted[mask] = mask._version, min(before + index.numel() * row, mask.numel())
        return result

    def _are_places(self, index: Any) -> bool:
        return self.torch.is_tensor(index) and index.dtype in (self.torch.int64, self.torch.int32)

    def _together(self, original: Any, *arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        if not self.noted or not arguments or not getattr(result, "is_cuda", False):
            return result
        of = arguments[0] if isinstance(arguments[0], (list, tuple)) else arguments
        masks = [one for one in of if self.torch.is_tensor(one)]
        if any(one in self.noted and one is not result for one in masks):
            most = [self.of(one) for one in masks]
            if None not in most and not self.computed.knows(result):
                self.noted[result] = result._version, sum(one or 0 for one in most)
        return result
