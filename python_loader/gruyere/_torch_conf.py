"""PYTORCH_ALLOC_CONF (PYTORCH_CUDA_ALLOC_CONF): what of it holds under Gruyère, said in one
line."""

from __future__ import annotations

import os
import re
from typing import Optional

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

# Keys of host memory: that is torch's as before.
_HOST = re.compile(r"^pinned_")


def settings() -> tuple[str, dict[str, str]]:
    """The variable that is set (torch reads the first of the two), and its keys and values. Empty
    where none is."""
    for variable in VARIABLES:
        text = os.environ.get(variable, "").strip()
        if text:
            # A value may be a list in brackets, with commas of its own.
            entries = re.findall(r"([^,:\s\[\]]+)\s*:\s*(\[[^\]]*\]|[^,]*)", text)
            return variable, {key: value.strip() for key, value in entries}
    return "", {}


def limit() -> Optional[str]:
    """`per_process_memory_fraction` as a value of our key `limit`."""
    fraction = settings()[1].get("per_process_memory_fraction")
    try:
        number = float(fraction) if fraction is not None else 1.0
    except ValueError:
        return None
    return f"{number * 100:.10g}%" if 0.0 < number < 1.0 else None


def line(limit_is_ours: bool) -> Optional[str]:
    """What becomes of each setting under Gruyère; None where nothing is set.
    `limit_is_ours`: the fraction was taken over, and no `limit` of GRUYERE_CONF stands before
    it."""
    variable, found = settings()
    if not found:
        return None
    parts = []
    fraction = found.pop("per_process_memory_fraction", None)
    if fraction is not None:
        if limit_is_ours:
            parts.append(f"per_process_memory_fraction:{fraction} is honoured (limit:{limit()})")
        elif limit() is None:
            parts.append(f"per_process_memory_fraction:{fraction} sets no bound")
        else:
            parts.append(
                f"per_process_memory_fraction:{fraction} gives way to limit: in GRUYERE_CONF"
            )
    host = [f"{key}:{value}" for key, value in found.items() if _HOST.match(key)]
    if host:
        parts.append(f"{', '.join(host)}: as before (host memory stays torch's)")
    rest = [f"{key}:{value}" for key, value in found.items() if not _HOST.match(key)]
    if rest:
        parts.append(
            f"{', '.join(rest)}: no meaning here (Gruyère's own settings are in GRUYERE_CONF)"
        )
    return f"{variable}: {'; '.join(parts)}"
