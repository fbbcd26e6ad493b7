"""torch.distributions: a distribution checks its parameters, and the samples whose probability is
asked for. In a training that goes well they are valid, so what such a check reads of the device
says so. Tensors on the host, and values that the host has copied, are checked as they are."""

from __future__ import annotations

import threading
from typing import Any

VALID = "torch.distributions: parameters and samples on the device are valid"

# What is read in a check, by the function that sums it up.
ANSWERS = {"all": True, "_is_all_true": True, "any": False}


class Valid(threading.local):
    """Whether this thread is in such a check."""

    depth = 0

    def checking(self, original: Any, *arguments: Any, **options: Any) -> Any:
        self.depth += 1
        try:
            return original(*arguments, **options)
        finally:
            self.depth -= 1


def checks(torch: Any) -> list[tuple[Any, str]]:
    """The methods that check, by their class. Some constructors check more than the first one."""
    base = torch.distributions.Distribution
    kinds = [base, *vars(torch.distributions).values()]
    made = [
        (kind, "__init__")
        for kind in kinds
        if isinstance(kind, type) and issubclass(kind, base) and "__init__" in vars(kind)
    ]
    return [*dict.fromkeys(made), (base, "_validate_sample")]
