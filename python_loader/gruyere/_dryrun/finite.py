"""Checks for values that are infinite or NaN: `if torch.isnan(loss): continue`, an assertion, a
norm of gradients that must be finite. In a training that goes well every value is finite, so a
check is answered as if they were, through whatever the program computes from its result."""

from __future__ import annotations

import functools
import math
import operator
from collections import Counter
from types import ModuleType
from typing import Any, Callable, Optional

from .computed import KNOWN, Computed
from .floats import are_random
from .functions import Functions
from .identity import ByIdentity
from .valid import ANSWERS, VALID, Valid, checks

FINITE = "torch.isnan, isinf, isfinite: every value is finite"

# What a check finds in every element.
_CHECKS = {
    "isnan": False, "isinf": False, "isposinf": False, "isneginf": False, "isfinite": True,
}  # fmt: skip
# Functions whose result has the value of their operand in every element.
_SAME = (
    "cpu", "to", "cuda", "detach", "clone", "contiguous", "bool", "int", "long", "float", "double",
    "flatten", "reshape", "view", "squeeze", "unsqueeze", "ravel", "stack", "cat",
    "any", "all", "_is_all_true", "max", "min", "amax", "amin", "mean",
)  # fmt: skip
_NOT = ("logical_not", "bitwise_not", "__invert__")
_SUMS = ("sum", "count_nonzero")
# Functions of two operands.
_TWO: dict[str, Callable[[Any, Any], Any]] = {
    "logical_or": lambda a, b: bool(a) or bool(b), "logical_and": lambda a, b: bool(a) and bool(b),
    "bitwise_or": operator.or_, "bitwise_and": operator.and_, "__or__": operator.or_,
    "__and__": operator.and_, "__ror__": operator.or_, "__rand__": operator.and_,
    "add": operator.add, "__add__": operator.add, "__radd__": operator.add,
    "mul": operator.mul, "__mul__": operator.mul, "__rmul__": operator.mul,
    **{
        name: getattr(operator, name)
        for short in ("gt", "ge", "lt", "le", "eq", "ne")
        for name in (short, f"__{short}__")
    },
}  # fmt: skip
# Comparisons of a value with itself or with an infinite one, which are checks too.
_EQUAL = {"eq": True, "__eq__": True, "ne": False, "__ne__": False}
# Functions that hand the value to the host.
_READS: dict[str, Callable[[Any], Any]] = {
    "__bool__": bool, "__int__": int, "__float__": float, "__index__": int,
}  # fmt: skip


class Known:
    """Tensors of which every element has a value that is known."""

    def __init__(self) -> None:
        # The tensor's version then, the value, and why it is known.
        self.values: ByIdentity[tuple[Optional[int], Any, str]] = ByIdentity()

    def note(self, tensor: Any, value: Any, why: str = FINITE) -> None:
        self.values[tensor] = _version(tensor), value, why

    def get(self, tensor: Any) -> Any:
        """The value of every element; None if it is not known, or was until something was written
        to the tensor."""
        version, value, _ = self.values.get(tensor) or (None, None, "")
        return value if value is None or version == _version(tensor) else None

    def why(self, tensor: Any) -> str:
        """Why the value is known."""
        return (self.values.get(tensor) or (None, None, FINITE))[2]


def _version(tensor: Any) -> Optional[int]:
    try:
        version: int = tensor._version
        return version
    except RuntimeError:
        # Tensors made in inference mode have none.
        return None


def _is_written_to(tensor: Any) -> bool:
    """Whether a kernel may have written to the tensor since it was made. The stand-in's memory then
    still has what the host has copied there, with zeros and with random values alike."""
    return bool(getattr(tensor, "is_cuda", False) and _version(tensor))


def _other(read: Any) -> Any:
    """Another value, of ordinary size."""
    return not read if isinstance(read, bool) else read + type(read)(1.531)


class Finite:
    def __init__(self, answered: Counter[str], known: Known, computed: Computed) -> None:
        self.answered = answered
        self.known = known
        self.computed = computed
        self.are_random = are_random()
        self.valid = Valid()

    def watch(self, torch: ModuleType, functions: Functions, library: Any) -> None:
        """Replace torch's functions, and register operators in `library`."""
        self.torch: Any = torch
        for name, value in _CHECKS.items():
            functions.replace(name, functools.partial(self._checked, value))
        for name in _SAME:
            functions.replace(name, functools.partial(self._derived, self._same))
        for name, value in ANSWERS.items():
            functions.replace(name, functools.partial(self._asked_if_valid, value))
        for owner, name in checks(torch):
            functions.patch(owner, name, self.valid.checking)
        for name in _NOT:
            functions.replace(name, functools.partial(self._derived, self._inverse))
        for name in _SUMS:
            functions.replace(name, functools.partial(self._derived, self._total))
        for name, of in _TWO.items():
            functions.replace(name, functools.partial(self._joined, of, _EQUAL.get(name)))
        for name in ("item", *_READS):
            functions.patch(torch.Tensor, name, functools.partial(self._read, _READS.get(name)))
        # Anomaly detection checks each gradient in C++; the result is on the host there.
        library.impl("_is_any_true", self._is_any_true, "CUDA")

    def _checked(self, value: bool, original: Any, *arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        operand = arguments[0] if arguments else options.get("input")
        if getattr(operand, "is_cuda", False) and getattr(result, "is_cuda", False):
            self.known.note(result, value)
        return result

    def _derived(self, of: Callable[..., Any], original: Any, *arguments: Any, **more: Any) -> Any:
        result = original(*arguments, **more)
        if self.known.values and arguments:
            value = self._value(arguments[0])
            if value is not None and isinstance(result, self.torch.Tensor):
                derived = of(value, arguments[0], result)
                if derived is not None:
                    self.known.note(result, derived)
        return result

    def _asked_if_valid(self, value: bool, original: Any, *arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        if self.valid.depth and getattr(result, "is_cuda", False):
            if self.known.get(result) is None:
                self.known.note(result, value, VALID)
        return result

    def _value(self, operand: Any) -> Any:
        """The value of an operand, a tensor or several; None if it is not known."""
        if isinstance(operand, (list, tuple)):
            values = {self.known.get(one) for one in operand}
            return values.pop() if len(values) == 1 else None
        return self.known.get(operand)

    def _same(self, value: Any, _operand: Any, result: Any) -> Any:
        return bool(value) if result.dtype is self.torch.bool else value

    def _inverse(self, value: Any, _operand: Any, result: Any) -> Any:
        return not value if result.dtype is self.torch.bool else None

    def _total(self, value: Any, operand: Any, result: Any) -> Any:
        return value * (operand.numel() // max(1, result.numel()))

    def _joined(
        self, of: Callable[..., Any], equal: Optional[bool], original: Any, *arguments: Any,
        **options: Any,
    ) -> Any:  # fmt: skip
        result = original(*arguments, **options)
        if len(arguments) != 2 or not isinstance(result, self.torch.Tensor):
            return result
        left, right = arguments
        if equal is not None and getattr(left, "is_cuda", False):
            if left is right:
                self.known.note(result, equal)
                return result
            if isinstance(right, float) and not math.isfinite(right):
                self.known.note(result, not equal)
                return result
        if self.known.values:
            values = [
                one if isinstance(one, (bool, int, float)) else self.known.get(one)
                for one in arguments
            ]
            if None not in values:
                self.known.note(result, of(*values))
        return result

    def _read(self, kind: Optional[Callable[[Any], Any]], original: Any, tensor: Any) -> Any:
        is_known = tensor.is_cuda and self.computed.knows(tensor)
        read = original(tensor)
        if is_known:
            self.answered[KNOWN] += 1
            return read
        value = self.known.get(tensor) if self.known.values else None
        if value is not None:
            self.answered[self.known.why(tensor)] += 1
            return (kind or type(read))(value)
        if self.are_random and (_is_written_to(tensor) or self.computed.has_forgotten(tensor)):
            return _other(read)
        return read

    def _is_any_true(self, tensor: Any) -> Any:
        # Allocates what the check itself would.
        tensor.any()
        self.answered[FINITE] += 1
        return self.torch.zeros((), dtype=self.torch.bool, device="cpu")
