"""PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF: what of them holds under Gruyère, said in one
line: of each key what it would have done, and what does that here."""

from __future__ import annotations

import os
import re
from typing import Optional

# From 2.9 on torch takes CUDA's own keys from the first variable that is set; before, there was no
# other. Either may hold keys of both.
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

# Keys of host memory: that stays torch's.
_HOST = re.compile(r"^pinned_")
_FRACTION = "per_process_memory_fraction"
_REJECTS = "throw_on_cudamalloc_oom"

_PAGES = "pages move to where they are needed here, whatever size is asked for"
# For each key, its effect in torch and its replacement here. docs/pytorch.md has the same.
_INSTEAD = {
    "expandable_segments": "says whether memory is mapped page by page; it always is here, and "
    "GRUYERE_CONF=backing:fixed takes plain allocations",
    "expandable_segments_reserve": "bounds the addresses of a segment; addresses are taken as "
    "they are needed here",
    "expandable_segments_reserve_by_class": "bounds the addresses of a segment; addresses are "
    "taken as they are needed here",
    "max_split_size_mb": f"keeps large blocks whole, so that they fit again; {_PAGES}",
    "max_non_split_rounding_mb": f"bounds what a whole block may lose to a smaller one; {_PAGES}",
    "large_segment_size_mb": "sets the length of segments; what is held beyond need is bounded by "
    "GRUYERE_CONF=slack: here",
    "roundup_power2_divisions": f"rounds sizes up, so that blocks fit again; {_PAGES}",
    "garbage_collection_threshold": "gives back what is cached above a share of the device; "
    "GRUYERE_CONF=auto_trim: does in phases of low memory here, and alert: above a threshold",
    "release_lock_on_cudamalloc": "lets other threads allocate while the driver is asked; small "
    "blocks of other streams have locks of their own here",
    "graph_capture_record_stream_reuse": "lets a capture use anew what record_stream has named; "
    "a graph's pool keeps that back here",
}
_BACKENDS = {
    "native": "chooses torch's own allocator; without Gruyère it serves",
    "cudaMallocAsync": "chooses the driver's stream-ordered pools; GRUYERE_CONF=backing:pool takes "
    "memory from them here",
}


def entries(text: str) -> dict[str, str]:
    """Keys and values of one variable."""
    # A value may be a list in brackets, with commas of its own.
    found = re.findall(r"([^,:\s\[\]]+)\s*:\s*(\[[^\]]*\]|[^,]*)", text)
    return {key: value.strip() for key, value in found}


def settings() -> dict[str, dict[str, str]]:
    """Of each variable that is set the keys and values."""
    found = {name: entries(os.environ.get(name, "").strip()) for name in VARIABLES}
    return {name: kept for name, kept in found.items() if kept}


def limit() -> Optional[str]:
    """`per_process_memory_fraction` as a value of our key `limit`."""
    # As torch: if both are set, CUDA's own keys are those of the first.
    first = next(iter(settings().values()), {})
    return _as_limit(first.get(_FRACTION))


def _as_limit(fraction: Optional[str]) -> Optional[str]:
    try:
        number = float(fraction) if fraction is not None else 1.0
    except ValueError:
        return None
    return f"{number * 100:.10g}%" if 0.0 < number < 1.0 else None


def line(limit_is_ours: bool, counts_rejections: bool) -> Optional[str]:
    """What becomes of each setting under Gruyère; None where nothing is set.
    `limit_is_ours`: the fraction was taken over, and no `limit` of GRUYERE_CONF stands before it.
    `counts_rejections`: torch's statistics and observers of rejected requests are served."""
    told = []
    for variable, found in settings().items():
        parts = []
        for key, value in found.items():
            if key == _FRACTION and told:
                meaning = f"{told[0].partition(':')[0]} stands before it, as for torch"
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
    return "gives way to limit: in GRUYERE_CONF"


def _of(key: str, value: str, counts_rejections: bool) -> str:
    if _HOST.match(key):
        return "holds as before (host memory stays torch's)"
    if key == _REJECTS:
        if counts_rejections:
            return "is honoured"
        return (
            "refuses what is above the limit before the driver is asked; that is always so here, "
            "and counted as an out-of-memory"
        )
    if key == "backend":
        instead = _BACKENDS.get(value)
    else:
        instead = _INSTEAD.get(key)
    return f"has no meaning here: it {instead}" if instead else "is no setting that Gruyère knows"
