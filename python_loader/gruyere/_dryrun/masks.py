"""Indexing by a mask, `nonzero`, `torch.where(condition)`: how many elements they select is known
to the device alone, and decides the sizes of what follows. They select every element here, or as
many as the program has set, the most that they can: what fits with these sizes fits with any. Of
masks whose values are known they select what they would."""

from __future__ import annotations

from collections import Counter
from types import ModuleType
from typing import Any

from .computed import KNOWN, Computed
from .finite import FINITE, Known
from .functions import Functions
from .most import Most

SELECTED = (
    "a mask, nonzero, torch.where: every element is selected, or as many as the program has set "
    "(the most that can be)"
)


class Masks:
    def __init__(self, answered: Counter[str], known: Known, computed: Computed) -> None:
        self.answered = answered
        self.known = known
        self.computed = computed
        self.most = Most(computed)

    def watch(self, torch: ModuleType, functions: Functions, library: Any) -> None:
        """Replace torch's functions, and register the operator in `library`."""
        self.torch: Any = torch
        self.most.watch(torch, functions)
        # Operators, autograd's too, count a mask by this one.
        library.impl("nonzero", self._nonzero, "CUDA")

    def _nonzero(self, mask: Any) -> Any:
        torch = self.torch
        # The original counts on the device, and reads that.
        counted = torch.empty(1, dtype=torch.long, device=mask.device)
        torch.empty(1, dtype=torch.long).copy_(counted)
        found = self.computed.places(mask)
        value, count = self.known.get(mask), mask.numel()
        if found is not None:
            self.answered[KNOWN] += 1
            count = len(found)
        elif value is None:
            self.answered[SELECTED] += 1
            most = self.most.of(mask)
            count = count if most is None else min(count, most)
        else:
            self.answered[FINITE] += 1
            count *= bool(value)
        places = torch.empty((mask.dim(), count), dtype=torch.long, device=mask.device)
        if found is not None:
            self.computed.set(places, found.t())
        return places.t()
