"""The warning about a `trace:` in GRUYERE_CONF that will not be written because nothing loads
Gruyère in the process."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Optional

from .._errors import warn_once
from .._native import conf


def wanted_trace() -> Optional[str]:
    """The trace file named in GRUYERE_CONF, or None."""
    file = conf.entries(os.environ.get(conf.VARIABLE, "")).get("trace", "none")
    return file if file not in ("", "none") else None


def watch(torch: ModuleType) -> None:
    """Check, and warn, when the program first uses CUDA. A program that loads the library has done
    so by then; a process that never uses CUDA gets no warning."""
    later = getattr(getattr(torch, "cuda", None), "_lazy_call", None)
    if later is not None and wanted_trace() is not None:
        later(_warn)


def _warn() -> None:
    file = wanted_trace()
    if file is not None and not _is_loaded():
        warn_once(
            f"{conf.VARIABLE} asks for a trace ({file}), but Gruyère is not loaded in this "
            "process, so none will be written: start the program with python -m gruyere, set "
            "GRUYERE_ENABLE=1, or, to trace torch's own allocator, use gruyere run --observe"
        )


def _is_loaded() -> bool:
    """Whether the library is loaded in this process, whether by a preload, by torch's constructor
    or by this package."""
    try:
        with open("/proc/self/maps") as maps:
            return any("gruyere" in os.path.basename(line.rstrip()) for line in maps)
    except OSError:
        return True
