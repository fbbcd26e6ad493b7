"""Floats that the stand-in invents. It does not know the type of what the host reads, so its random
values are bytes that are a small integer of any width: as a float, next to nothing. The types are
known here: such a float is read as a number of ordinary size, with which a program that compares or
scales it may decide otherwise than with zeros."""

from __future__ import annotations

import os
from typing import Any

# By the integer, from 1 on. All positive: programs take logarithms and roots.
_ORDINARY = (0.0213, 0.117, 0.331, 0.523, 0.709, 1.531, 3.07)
# The largest of these integers.
LARGEST = len(_ORDINARY)


def are_random() -> bool:
    """Whether the stand-in invents other values than zeros."""
    return os.environ.get("PHANTOM_VALUES", "").startswith("random")


class Floats:
    def __init__(self, torch: Any) -> None:
        self.torch = torch

    def ordinary(self, tensor: Any, name: str, found: Any) -> Any:
        """What the method `name` of a tensor on the device has `found`, with numbers of ordinary
        size for those that were invented."""
        about = self.torch.finfo(tensor.dtype)
        least = about.smallest_normal * about.eps
        if name == "__int__":
            return int(self._of(tensor.item(), least))
        if isinstance(found, self.torch.Tensor):
            if not found.is_cuda and found.is_floating_point():
                self._fill(found, least)
            return found
        return self._of(found, least)

    def _of(self, found: Any, least: float) -> Any:
        if isinstance(found, list):
            return [self._of(one, least) for one in found]
        if isinstance(found, float) and 0 < found < least * (len(_ORDINARY) + 0.5):
            return _ORDINARY[round(found / least) - 1]
        return found

    def _fill(self, found: Any, least: float) -> None:
        with self.torch.no_grad():
            values = found.detach()
            for number, value in enumerate(_ORDINARY, 1):
                values[values == number * least] = value
