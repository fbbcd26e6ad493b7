"""Conditions on values that the host has copied to the device, or on masks of ones that were made
there: `(mask == 1).all()`, `(ids < 0).any()`. The kernels that compute them do nothing on the
stand-in, but the values are known, so the conditions are computed on the host once the program
reads the result."""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass
from typing import Any, Callable, Optional

from .identity import ByIdentity

COPIED = "conditions on values copied from the host, or on a mask of ones: computed on the host"
# The most values that one is computed from.
_MOST = 1 << 24

_Step = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


@dataclass
class _Trail:
    """How a tensor was computed."""

    root: Any
    """A weak reference to the tensor that the host has copied, perhaps."""
    steps: tuple[_Step, ...]


class Copied:
    def __init__(self) -> None:
        self.torch: Any = None
        self.trails: ByIdentity[_Trail] = ByIdentity()
        # Masks that were made on the device with ones.
        self.ones: ByIdentity[bool] = ByIdentity()
        library = ctypes.CDLL(None)
        self.is_known = getattr(library, "phantom_is_known", None)
        if self.is_known is not None:
            self.is_known.argtypes = [ctypes.c_uint64, ctypes.c_uint64]

    def made_of_ones(self, result: Any) -> None:
        if getattr(result, "is_cuda", False) and not result.is_floating_point():
            self.ones[result] = True

    def computed(
        self, result: Any, operand: Any, call: Callable[..., Any], more: tuple[Any, ...],
        options: dict[str, Any],
    ) -> None:  # fmt: skip
        """`result` was computed from `operand` by `call`, and from nothing else on the device."""
        if self.is_known is None or not getattr(operand, "is_cuda", False):
            return
        if not all(map(self._is_plain, (*more, *options.values()))):
            # Another tensor, which would live as long as what is kept here.
            return
        before = self.trails.get(operand)
        if before is None and not _is_unchanged(operand):
            return
        trail = before or _Trail(weakref.ref(operand), ())
        self.trails[result] = _Trail(trail.root, (*trail.steps, (call, more, options)))

    def _is_plain(self, value: Any) -> bool:
        if isinstance(value, (tuple, list)):
            return all(map(self._is_plain, value))
        return value is None or isinstance(value, (bool, int, float, self.torch.dtype))

    def value(self, tensor: Any) -> Optional[Any]:
        """The value of a tensor of one element; None if it is not known."""
        trail = self.trails.get(tensor)
        root = trail and trail.root()
        if root is None or not _is_unchanged(tensor) or not self._has(root):
            return None
        if root in self.ones:
            found = self.torch.ones(root.shape, dtype=root.dtype)
        else:
            found = root.detach().to("cpu")
        for call, more, options in trail.steps:
            found = call(found, *more, **options)
        return found.item()

    def _has(self, root: Any) -> bool:
        """Whether all values of the tensor are known."""
        if not _is_unchanged(root) or not root.is_contiguous() or root.numel() > _MOST:
            return False
        size = root.numel() * root.element_size()
        return root in self.ones or bool(self.is_known(root.data_ptr(), size))


def _is_unchanged(tensor: Any) -> bool:
    """Whether no kernel has written to the tensor since it was made."""
    try:
        return bool(tensor._version == 0)
    except RuntimeError:
        # Tensors made in inference mode do not tell.
        return False
