"""The start-up hook: `gruyere_startup.pth` imports it when an interpreter starts with
GRUYERE_ENABLE set, or with a `trace:` in GRUYERE_CONF.

After that, importing torch enables Gruyère if GRUYERE_ENABLE asks for it; otherwise the program is
warned that no trace will be written.

It costs one small import, touches neither torch nor the library, and must never keep an interpreter
from starting."""

from __future__ import annotations

from ._imports import when_imported

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Callable, Optional

# Whether a torch without CUDA is an error (python -m gruyere) or is ignored (GRUYERE_ENABLE=1).
required = False
# Called with the error if Gruyère cannot be enabled, in place of raising it. python -m gruyere ends
# the program there.
refuse: Optional[Callable[[Exception], None]] = None
_watching = False


def watch() -> None:
    """Enable Gruyère once torch is imported, if the environment still asks for it then. May be
    called any number of times."""
    global _watching
    if not _watching:
        _watching = True
        when_imported("torch", _enable)


def _enable(torch: ModuleType) -> None:
    from . import _enable as enabling

    try:
        is_wanted = enabling.is_wanted()
        if is_wanted:
            enabling.enable_automatically(required)
    except enabling.GruyereError as error:
        if refuse is not None:
            refuse(error)
        raise
    if not is_wanted:
        from ._torch import trace_warning

        trace_warning.watch(torch)


watch()
