"""Lookups by object identity. A module's own `==` and hash are never called, because they may do
anything (torchmetrics' `==` makes a third module of the two)."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, Generic, Optional, TypeVar

Value = TypeVar("Value")


class ByIdentity(Generic[Value]):
    """A mapping keyed by object identity; an entry lasts as long as its key lives."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[weakref.ref[Any], Value]] = {}

    def get(self, key: Any) -> Optional[Value]:
        entry = self.known.get(id(key))
        return entry[1] if entry is not None and entry[0]() is key else None

    def __len__(self) -> int:
        return len(self.known)

    def __contains__(self, key: Any) -> bool:
        entry = self.known.get(id(key))
        return entry is not None and entry[0]() is key

    def __setitem__(self, key: Any, value: Value) -> None:
        known, number = self.known, id(key)

        def gone(ref: weakref.ref[Any]) -> None:
            # Another object may have the same id by now.
            if number in known and known[number][0] is ref:
                del known[number]

        known[number] = weakref.ref(key, gone), value


def named_modules(root: Any) -> Iterator[tuple[str, Any]]:
    """The module and all its submodules, each once, with its path, in torch's order."""
    seen: set[int] = set()
    waiting = [("", root)]
    while waiting:
        path, module = waiting.pop()
        if module is None or id(module) in seen:
            continue
        seen.add(id(module))
        yield path, module
        parts = list(getattr(module, "_modules", {}).items())
        waiting += [(f"{path}.{name}" if path else name, part) for name, part in reversed(parts)]


def named_tensors(root: Any) -> Iterator[tuple[str, Any]]:
    """The parameters and buffers of the module and its submodules, each once, with its path."""
    seen: set[int] = set()
    for path, module in named_modules(root):
        for kind in ("_parameters", "_buffers"):
            for name, value in list(getattr(module, kind, {}).items()):
                if value is not None and id(value) not in seen:
                    seen.add(id(value))
                    yield (f"{path}.{name}" if path else name), value
