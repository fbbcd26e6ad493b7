"""The answer as one HTML file that opens offline. All text of the program's is JSON's, with `<`
escaped, and the page sets it as text only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from . import text

_HERE = Path(__file__).parent


def draw(report: dict[str, Any]) -> str:
    peak = report["peak"] or {"modules": [], "lines": []}
    steps = report["program"]["steps"]
    words = "; ".join(report["program"]["left_out"])
    left_out = f" Left out of it: {words}. {text.LEFT_OUT}" if words else ""
    facts = {
        "report": report,
        "command": report["program"]["command"],
        "verdict": text.verdict(report),
        "said": (
            f"{steps} step{'s' * (steps != 1)} with torch {report['machine'].get('torch', '?')} on "
            f"a stand-in GPU, {report.get('seconds', 0):.0f} s. {text.SILICON}{left_out}"
        ),
        "notes": (
            "Each was really run at its size, less the context; left is what the books leave, "
            "negative what lacks at least. ?: with a context that is assumed. *: on a device with "
            "room, since at its size the program ran out of memory. Tight: the allocator had to "
            "give cached memory back to get through."
        ),
        "modules": [text.named(row) for row in peak["modules"]],
        "sources": [text.source(row["line"]) for row in peak["lines"]],
        "scope": text.scope(report),
        "silicon": text.SILICON,
    }
    # The one character that could end the element.
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
    """The page with its parts put in, each at its mark, in their order; what is put in is not
    looked through for marks."""
    filled = []
    for mark, part in parts.items():
        before, _, whole = whole.partition(mark)
        filled += [before, part]
    return "".join([*filled, whole])
