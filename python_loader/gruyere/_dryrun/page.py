"""The answer as a single HTML file that works offline. All text from the program is in the JSON,
with `<` escaped, and the page inserts it as text only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from . import sentences, text

_HERE = Path(__file__).parent


def draw(report: dict[str, Any]) -> str:
    peak = report["peak"] or {"modules": [], "lines": []}
    steps = report["program"]["steps"]
    words = "; ".join(report["program"]["left_out"])
    left_out = f" Ignored settings: {words}. {text.LEFT_OUT}" if words else ""
    facts = {
        "report": report,
        "command": report["program"]["command"],
        "verdict": sentences.verdict(report),
        "said": (
            f"{steps} step{'s' * (steps != 1)} with torch {report['machine'].get('torch', '?')} on "
            f"a stand-in GPU, {report.get('seconds', 0):.0f} s. {text.SILICON}{left_out}"
        ),
        "notes": (
            "Each row was run at the GPU's size less the context. Left: memory free at the peak; "
            "if negative, the least that is missing. ?: the context is assumed. *: measured on a "
            "larger device, since at this size the program ran out of memory. Tight: the program "
            "completed only after cached memory was released."
        ),
        "modules": [text.named(row) for row in peak["modules"]],
        "sources": [text.source(row["line"]) for row in peak["lines"]],
        "scope": sentences.scope(report),
        "silicon": text.SILICON,
    }
    # `<` is the only character that could end the element.
    facts_text = json.dumps(facts).replace("<", "\\u003c")
    return _fill(
        _read(_HERE / "page.html"),
        {
            "/*STYLE*/": _read(_HERE.parent / "_page" / "style.css"),
            "/*FACTS*/": facts_text,
            "/*SHARED*/": _read(_HERE.parent / "_page" / "shared.js"),
        },
    )


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _fill(whole: str, parts: dict[str, str]) -> str:
    """Insert the parts at their marks, which must be in this order. Inserted text is not searched
    for marks."""
    filled = []
    for mark, part in parts.items():
        before, _, whole = whole.partition(mark)
        filled += [before, part]
    return "".join([*filled, whole])
