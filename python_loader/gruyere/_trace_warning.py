"""A `trace:` in GRUYERE_CONF of a process in which nothing loads Gruyère: there will be no trace,
and somebody counts on it."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Optional

from . import _settings
from ._errors import warn_once


def wanted_trace() -> Optional[str]:
    """The file that GRUYERE_CONF asks for."""
    file = _settings.entries(os.environ.get(_settings.VARIABLE, "")).get("trace", "none")
    return file if file not in ("", "none") else None


def watch(torch: ModuleType) -> None:
    """Warns when the program first uses CUDA: whoever loads the library has loaded it by then, and
    a process that never does is silent."""
    later = getattr(getattr(torch, "cuda", None), "_lazy_call", None)
    if later is not None and wanted_trace() is not None:
        later(_warn)


def _warn() -> None:
    file = wanted_trace()
    if file is not None and not _is_loaded():
        warn_once(
            f"{_settings.VARIABLE} asks for a trace ({file}), and nothing loads Gruyère in "
            "this process, so none will be written: start the"
            " program with python -m gruyere, set GRUYERE_ENABLE=1, or, to trace torch's own "
            "allocator, use gruyere run --observe"
        )


def _is_loaded() -> bool:
    """Whether the library is in this process, by whatever way: a preload, torch's constructor,
    ours."""
    try:
        with open("/proc/self/maps") as maps:
            return any("gruyere" in os.path.basename(line.rstrip()) for line in maps)
    except OSError:
        return True
