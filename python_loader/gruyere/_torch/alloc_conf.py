"""PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF under Gruyère: one line that says for each key
whether it is honoured, or what it does in torch and what takes its place here."""

from __future__ import annotations

import os
import re
from typing import Optional

# torch 2.9 and newer read CUDA's own keys from the first of these that is set; older versions have
# only the first. Either may hold keys of both kinds.
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

# Keys for host memory, which stays torch's.
_HOST = re.compile(r"^pinned_")
_FRACTION = "per_process_memory_fraction"
_REJECTS = "throw_on_cudamalloc_oom"

_PAGES = "pages move to where they are needed here, whatever the size of the request"
# For each key, its effect in torch and its replacement here. docs/pytorch.md has the same.
_INSTEAD = {
    "expandable_segments": "says whether memory is mapped page by page; it always is here, and "
    "GRUYERE_CONF=backing:fixed uses plain allocations",
    "expandable_segments_reserve": "bounds the addresses of a segment; addresses are reserved as "
    "they are needed here",
    "expandable_segments_reserve_by_class": "bounds the addresses of a segment; addresses are "
    "reserved as they are needed here",
    "max_split_size_mb": f"keeps large blocks whole, so that they can be reused; {_PAGES}",
    "max_non_split_rounding_mb": f"bounds what a whole block may waste on a smaller one; {_PAGES}",
    "large_segment_size_mb": "sets the size of segments; GRUYERE_CONF=slack: bounds the memory "
    "held beyond need here",
    "roundup_power2_divisions": f"rounds sizes up, so that blocks can be reused; {_PAGES}",
    "garbage_collection_threshold": "releases cached memory above a share of the device; here "
    "GRUYERE_CONF=auto_trim: releases it in phases of low memory, and alert: above a threshold",
    "release_lock_on_cudamalloc": "lets other threads allocate during a call of the driver; small "
    "blocks of other streams have locks of their own here",
    "graph_capture_record_stream_reuse": "lets a capture reuse memory that record_stream has "
    "named; a graph's pool does not reuse it here",
}
_BACKENDS = {
    "native": "chooses torch's own allocator; run without Gruyère to use it",
    "cudaMallocAsync": "chooses the driver's stream-ordered pools; GRUYERE_CONF=backing:pool takes "
    "memory from them here",
}


def entries(text: str) -> dict[str, str]:
    """The keys and values of one variable."""
    # A value may be a list in brackets, with commas of its own.
    found = re.findall(r"([^,:\s\[\]]+)\s*:\s*(\[[^\]]*\]|[^,]*)", text)
    return {key: value.strip() for key, value in found}


def settings() -> dict[str, dict[str, str]]:
    """The keys and values of each variable that is set."""
    found = {name: entries(os.environ.get(name, "").strip()) for name in VARIABLES}
    return {name: kept for name, kept in found.items() if kept}


def limit() -> Optional[str]:
    """`per_process_memory_fraction` as a value for our key `limit`, or None."""
    # As in torch: if both variables are set, CUDA's own keys are read from the first.
    first = next(iter(settings().values()), {})
    return _as_limit(first.get(_FRACTION))


def _as_limit(fraction: Optional[str]) -> Optional[str]:
    try:
        number = float(fraction) if fraction is not None else 1.0
    except ValueError:
        return None
    return f"{number * 100:.10g}%" if 0.0 < number < 1.0 else None


def line(limit_is_ours: bool, counts_rejections: bool) -> Optional[str]:
    """The line that says what each setting means under Gruyère; None if nothing is set.

    `limit_is_ours`: the fraction became our limit, since GRUYERE_CONF has no `limit`.
    `counts_rejections`: torch's statistics and observers of rejected requests are supported."""
    told = []
    for variable, found in settings().items():
        parts = []
        for key, value in found.items():
            if key == _FRACTION and told:
                meaning = f"{told[0].partition(':')[0]} takes precedence, as for torch"
            elif key == _FRACTION:
                meaning = _of_fraction(value, limit_is_ours)
            else:
                meaning = _of(key, value, counts_rejections)
            parts.append(f"{key}:{value}: {meaning}")
        told.append(f"{variable}: {'. '.join(parts)}")
    return ". ".join(told) or None


def _of_fraction(value: str, limit_is_ours: bool) -> str:
    if _as_limit(value) is None:
        return "sets no bound"
    if limit_is_ours:
        return f"is honoured (limit:{limit()})"
    return "is overridden by limit: in GRUYERE_CONF"


def _of(key: str, value: str, counts_rejections: bool) -> str:
    if _HOST.match(key):
        return "applies as before (host memory stays torch's)"
    if key == _REJECTS:
        if counts_rejections:
            return "is honoured"
        return (
            "refuses requests above the limit without calling the driver; Gruyère always does so, "
            "and counts them as out-of-memory"
        )
    if key == "backend":
        instead = _BACKENDS.get(value)
    else:
        instead = _INSTEAD.get(key)
    return f"has no meaning here: it {instead}" if instead else "is not known to Gruyère"
