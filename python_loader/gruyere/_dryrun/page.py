"""The answer as one HTML file that opens offline. All text of the program's is JSON's, with `<`
escaped, and the page sets it as text only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from . import text

_MARK = "/*FACTS*/"


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
    whole = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
    before, _, after = whole.partition(_MARK)
    # The one character that could end the element.
    return before + json.dumps(facts).replace("<", "\\u003c") + after
