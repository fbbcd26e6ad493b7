"""Gruyère: a CUDA memory allocator for PyTorch with almost no holes.

    import gruyere

    gruyere.enable()  # before the program touches CUDA

or, without changes to the program, `python -m gruyere train.py` or
`GRUYERE_ENABLE=1 python train.py`.

Importing this package imports neither torch nor the library.
"""

from __future__ import annotations

import importlib

# For type checkers: the names that __getattr__ below returns. (`typing` would take longer to import
# than the rest.)
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ._control import Alert as Alert
    from ._control import Stats as Stats
    from ._control import on_alert as on_alert
    from ._control import stats as stats
    from ._control import trim as trim
    from ._enable import disable_reason as disable_reason
    from ._enable import enable as enable
    from ._enable import is_enabled as is_enabled
    from ._errors import GruyereError as GruyereError
    from ._errors import GruyereWarning as GruyereWarning
    from ._lifetimes import lifetime as lifetime
    from ._pools import Pool as Pool
    from ._pools import PoolBlock as PoolBlock
    from ._pools import PoolInUse as PoolInUse
    from ._pools import PoolStats as PoolStats
    from ._pools import pool as pool
    from ._steps import checkpoint as checkpoint
    from ._steps import step as step

# The module of each public name.
_HOMES = {
    "enable": "_enable",
    "is_enabled": "_enable",
    "disable_reason": "_enable",
    "GruyereError": "_errors",
    "GruyereWarning": "_errors",
    "lifetime": "_lifetimes",
    "step": "_steps",
    "checkpoint": "_steps",
    "trim": "_control",
    "stats": "_control",
    "on_alert": "_control",
    "Alert": "_control",
    "Stats": "_control",
    "pool": "_pools",
    "Pool": "_pools",
    "PoolBlock": "_pools",
    "PoolInUse": "_pools",
    "PoolStats": "_pools",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_HOMES))
