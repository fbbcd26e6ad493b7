"""What this package raises and warns of."""

from __future__ import annotations

import warnings


class GruyereError(RuntimeError):
    """Gruyère cannot do what was asked; the text says why, and what to do."""


class GruyereWarning(UserWarning):
    """Something will not do what the program may expect of it; the text says what to use instead."""


_said: set[str] = set()


def warn_once(text: str) -> None:
    """Warns of `text`, once in the life of the process."""
    if text not in _said:
        _said.add(text)
        warnings.warn(text, GruyereWarning, stacklevel=3)
