"""Indexing by a mask, `nonzero`, `torch.where(condition)`: how many elements they select is known
to the device alone, and decides the sizes of what follows. They select every element here, the most
that they can, so what fits with these sizes fits with any."""

from __future__ import annotations

from collections import Counter
from types import ModuleType
from typing import Any

from .finite import FINITE, Known

SELECTED = "a mask, nonzero, torch.where: every element is selected (the most that can be)"


class Masks:
    def __init__(self, answered: Counter[str], known: Known) -> None:
        self.answered = answered
        self.known = known

    def watch(self, torch: ModuleType, library: Any) -> None:
        """Register the operator in `library`. Call once torch is imported."""
        self.torch: Any = torch
        # Operators, autograd's too, count a mask by this one.
        library.impl("nonzero", self._nonzero, "CUDA")

    def _nonzero(self, mask: Any) -> Any:
        torch = self.torch
        # The original counts on the device, and reads that.
        counted = torch.empty(1, dtype=torch.long, device=mask.device)
        torch.empty(1, dtype=torch.long).copy_(counted)
        value, count = self.known.get(mask), mask.numel()
        if value is None:
            self.answered[SELECTED] += 1
        else:
            self.answered[FINITE] += 1
            count *= bool(value)
        places = torch.empty((mask.dim(), count), dtype=torch.long, device=mask.device)
        return places.t()
