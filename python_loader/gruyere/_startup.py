"""What `gruyere_startup.pth` runs when an interpreter starts with GRUYERE_ENABLE set: from then on,
importing torch enables Gruyère. And with a `trace:` in GRUYERE_CONF: where nothing enables Gruyère,
the program is told that there will be none.

It costs one small import, touches neither torch nor the library, and must never keep an interpreter
from starting."""

from __future__ import annotations

from types import ModuleType

from ._imports import when_imported

# Whether a torch without CUDA is an error (python -m gruyere) or not our business
# (GRUYERE_ENABLE=1).
required = False
_watching = False


def watch() -> None:
    """Enables Gruyère once torch is imported, if the environment still asks for it then. Any number
    of calls is fine."""
    global _watching
    if not _watching:
        _watching = True
        when_imported("torch", _enable)


def _enable(torch: ModuleType) -> None:
    from . import _enable as enabling

    if enabling.is_wanted():
        enabling.enable_automatically(required)
    else:
        from . import _trace_warning

        _trace_warning.watch(torch)


watch()
