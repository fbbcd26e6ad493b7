"""The answer as tables and lists for a terminal, below its sentences."""

from __future__ import annotations

import linecache
import shutil
import sys
import textwrap
from typing import Any, Optional

from .._bench.measure import OUT_OF_MEMORY
from .amounts import signed, size, times
from .runs import RANDOM, ROOM, Plan, called
from .sentences import first_rank, runs, scope, sizes_itself, verdict

SILICON = "Not checked against silicon: no GPU has run the program."
LEFT_OUT = "Each row uses the allocator that it names."
# The number of rows shown of each list.
_ROWS = 10


def of_plan(plan: Plan, usable: int) -> str:
    """A run, for the progress display. Must not contain ": "."""
    if plan.analysed:
        values = "with other values" if plan.values == RANDOM else "every allocation"
        return f"{plan.gpu['id']}, analysing {values}"
    what = f"{plan.gpu['id']} under {called(plan.allocator)}"
    if plan.memory == ROOM:
        return f"{what}, with room to spare"
    return what if plan.memory == usable else f"{what}, with {size(plan.memory)}"


def draw(report: dict[str, Any], width: Optional[int] = None) -> str:
    if width is None:
        # COLUMNS counts for a file too.
        unknown = 80 if sys.stdout.isatty() else 100
        width = shutil.get_terminal_size((unknown, 24)).columns
    width = max(60, min(width, 120))
    parts = [
        _head(report, width),
        _devices(report, width),
        _others(report, width),
        _sweep(report, width),
        _kinds(report, width),
        _modules(report, width),
        _lines(report, width),
        _fixed(report, width),
        _trust(report, width),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _wrapped(text: str, width: int, indent: str = "") -> str:
    return textwrap.fill(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _head(report: dict[str, Any], width: int) -> str:
    steps = report["program"]["steps"]
    asked = report["program"]["steps_asked"]
    is_out = report.get("analysed", {}).get("outcome") == OUT_OF_MEMORY
    why = "it ran out of memory" if is_out else "the program ended by itself"
    ended = "" if steps >= asked else f" ({asked} requested; {why})"
    left_out = "; ".join(report["program"]["left_out"])
    rank = first_rank(report)
    lines = [
        _cut(runs(report), width),
        _wrapped(verdict(report), width),
        "",
        _wrapped(
            f"{report['program']['command']}: {steps} step{'s' * (steps != 1)}{ended}, torch "
            f"{report['machine'].get('torch', '?')}{rank and f', {rank}'} on a simulated "
            f"{' / '.join(gpu['name'] for gpu in report['gpus'])}. {SILICON}",
            width,
        ),
    ]
    if left_out:
        lines.append(_wrapped(f"Ignored settings: {left_out}. {LEFT_OUT}", width))
    return "\n".join(lines)


def _table(rows: list[list[str]], left: int = 1, gap: int = 2) -> list[str]:
    """Lines of aligned columns, `gap` blanks apart; the first `left` columns are left-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        (" " * gap)
        .join(
            cell.ljust(widths[column]) if column < left else cell.rjust(widths[column])
            for column, cell in enumerate(row)
        )
        .rstrip()
        for row in rows
    ]


def _devices_table(rows: list[list[str]], width: int) -> list[str]:
    """The lines of the table of GPUs, in the first form that fits the width: as it is; with each
    GPU and its memory, the first two columns, on a line of its own; with less room between the
    columns as well."""
    whole = _table(rows, 3)
    if max(map(len, whole)) <= width:
        return whole
    inner = [row[2:] for row in rows]
    for gap in (2, 1):
        lines = [f"  {line}" for line in _table(inner, 1, gap)]
        if max(map(len, lines)) <= width:
            break
    parted = []
    for row, line in zip(rows, lines):
        if row is not rows[0] and row[0]:
            parted.append(f"{row[0]}, {row[1]}")
        parted.append(line)
    return parted


def _devices(report: dict[str, Any], width: int) -> str:
    rows = [["GPU", "memory", "allocator", "fits", "peak live", "peak held", "+ context", "left"]]
    if any(row["smallest_device"] for gpu in report["gpus"] for row in gpu["runs"]):
        rows[0].append("smallest GPU")
    for gpu in report["gpus"]:
        for row in gpu["runs"]:
            first = row is gpu["runs"][0]
            mark = "" if gpu["context"]["known"] else "?"
            if row["failed"]:
                cells = ["", "", row["allocator"], "failed", *"-" * (len(rows[0]) - 4)]
                if first:
                    cells[:2] = gpu["id"], size(gpu["memory"])
                rows.append(cells)
                continue
            held = size(row["peak_held"]) + ("" if row["at_size"] else "*")
            needs = size(row["peak_held"] + gpu["context"]["bytes"]) + mark
            is_unknown = row["margin"] is None or row.get("filled")
            left = "-" if is_unknown else signed(row["margin"])
            fits = ("tight" if row["tight"] else "yes") if row["fits"] else "NO"
            if row.get("short"):
                fits = "?"
            cells = [
                gpu["id"] if first else "", size(gpu["memory"]) if first else "",
                row["allocator"], fits, size(row["peak_live"]), held, needs, left,
            ]  # fmt: skip
            if len(rows[0]) > len(cells):
                cells.append(size(row["smallest_gpu"]) + mark if row["smallest_gpu"] else "-")
            rows.append(cells)
    notes = ["Each row was run at the GPU's size less the context; left: memory free at the peak."]
    runs = [row for gpu in report["gpus"] for row in gpu["runs"] if not row["failed"]]
    if any(not gpu["context"]["known"] for gpu in report["gpus"]):
        notes.append("? The context of this GPU is not known; it is assumed (see fixed costs).")
    if any(not row["at_size"] for row in runs):
        notes.append("* Measured on a larger device: at this size the program ran out of memory.")
    if any(not row["fits"] and row["at_size"] and not row.get("short") for row in runs):
        notes.append("NO with peaks of this size: those until the program ran out of memory.")
    if any(row.get("short") for row in runs):
        notes.append("fits ?: the program ended before its steps were made (see above).")
    if any(row["tight"] for row in runs):
        notes.append("Tight: cached memory had to be released, and under 2% of the GPU was left.")
    if any(row.get("filled") for row in runs):
        notes.append(
            "left -: what the program tried in vain filled the GPU; the row's peaks are of that, "
            "too."
        )
    least = report["peak"]["bytes"] if report["peak"] else None
    if any(
        row["allocator"] == "torch" and row["peak_live"] != least and not row["caught"]
        for row in runs
    ):
        notes.append("torch's default also counts remainders that it does not split off.")
    return "\n".join([*_devices_table(rows, width), *(_wrapped(note, width) for note in notes)])


def _others(report: dict[str, Any], width: int) -> str:
    if not report["others"]:
        return ""
    if report.get("sizing"):
        return _wrapped(f"Other GPUs: {sizes_itself(report['sizing'])}.", width)
    said: dict[str, list[str]] = {"fits": [], "close": [], "too small": []}
    for gpu in report["others"]:
        words = {row["by_the_books"] for row in gpu["runs"]}
        best = next((word for word in said if word in words), None)
        if best is not None:
            said[best].append(gpu["id"])
    shown = {"fits": "it fits on", "close": "it may fit on", "too small": "too small"}
    lines = ["Other GPUs, judged by these figures (not run; --gpu NAME runs it):"]
    for word, names in said.items():
        if names:
            lines.append(_wrapped(f"  {shown[word]:<13} {', '.join(names)}", width, " " * 16))
    return "\n".join(lines)


def _sweep(report: dict[str, Any], width: int) -> str:
    sweep = report["sweep"]
    if not sweep:
        return ""
    rows = [["GPU", "allocator", sweep["name"], "fits", "peak live", "peak held"]]
    for row in sweep["rows"]:
        done = row["fits"]
        rows.append([
            row["gpu"], row["allocator"], row["value"],
            "yes" if done else "no steps" if row.get("short") else "NO",
            size(row["peak_live"]) if done else "-", size(row["peak_held"]) if done else "-",
        ])  # fmt: skip
    lost = [row for row in sweep["rows"] if row.get("short")]
    command = report["program"]["command"]
    title = _wrapped(f"{sweep['name']}, values tried; the rest is for {command}", width)
    lines = [title, *_table(rows, 2)]
    for row in sweep["largest"]:
        value = row["value"] or "none"
        lines.append(f"The largest that fits on {row['gpu']} with {row['allocator']}: {value}")
    if lost:
        value = min((row["value"] for row in lost), key=lambda word: (len(word), word))
        lines.append(_wrapped(f"No steps: with {value}, {lost[0]['short']}.", width))
    return "\n".join(lines)


def _bar(share: float, room: int) -> str:
    return "█" * max(1, round(share * room)) if share > 0 else ""


def _kinds(report: dict[str, Any], width: int) -> str:
    peak = report["peak"]
    if not peak:
        return ""
    if not peak["bytes"]:
        return "Nothing was ever live: the program requested no memory."
    when = f"{peak['phase']}, " if peak["phase"] else ""
    if peak["step"]:
        when = f"in step {peak['step']}, {when}"
    where = f"{when}at {peak['line']}"
    until = " until it ran out of memory" if peak["out_of_memory"] else ""
    if peak.get("refused") and not peak["out_of_memory"]:
        until = " after it last ran out of memory"
    lines = [_wrapped(f"Live at the peak{until}: {size(peak['bytes'])}, {where}", width)]
    for kind, number in peak["kinds"].items():
        if number:
            share = number / peak["bytes"]
            bar = _bar(share, min(40, width - 40))
            lines.append(f"  {kind:<16} {size(number):>10} {share:>5.0%}  {bar}".rstrip())
    if not report["machine"].get("metadata", True):
        lines.append(
            _wrapped(
                "This torch does not record the module and phase of a request (2.11 does): most "
                "memory other than weights is reported as temporaries or other, without a module.",
                width,
            )
        )
    return "\n".join(lines)


def _of_kinds(kinds: dict[str, int]) -> str:
    ordered = sorted(kinds.items(), key=lambda item: -item[1])
    return ", ".join(f"{kind} {size(number)}" for kind, number in ordered if number)


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[: width - 1] + "…"


def _listed(title: str, rows: list[tuple[str, int, str]], width: int) -> str:
    """A list of rows (name, bytes, details), with the details cut to the width."""
    shown = rows[:_ROWS]
    room = min(max(len(what) for what, _, _ in shown), width // 2)
    lines = [title]
    for what, number, more in shown:
        if len(what) > room:
            what = "…" + what[len(what) - room + 1 :]
        lines.append(_cut(f"  {what:<{room}} {size(number):>10}  {more}".rstrip(), width))
    rest = rows[_ROWS:]
    if rest:
        total = sum(number for _, number, _ in rest)
        lines.append(f"  {f'{len(rest)} more':<{room}} {size(total):>10}")
    return "\n".join(lines)


def named(row: dict[str, Any]) -> str:
    """A module of the report, with the number of its repetitions."""
    name = row["module"] or "(outside any module)"
    return f"{name} x{row['count']}" if row["count"] > 1 else name


def _modules(report: dict[str, Any], width: int) -> str:
    peak = report["peak"]
    if not peak or not peak["bytes"]:
        return ""
    rows = [(named(row), row["bytes"], _of_kinds(row["kinds"])) for row in peak["modules"]]
    return _listed("By module", rows, width)


def source(line: str) -> str:
    """The source text of a line of the program."""
    file, _, number = line.rpartition(":")
    return linecache.getline(file, int(number)).strip() if file else ""


def _lines(report: dict[str, Any], width: int) -> str:
    peak = report["peak"]
    if not peak or not peak["bytes"]:
        return ""
    rows = [(row["line"], row["bytes"], source(row["line"])) for row in peak["lines"]]
    return _listed("By line of the program", rows, width)


def _fixed(report: dict[str, Any], width: int) -> str:
    lines = ["Fixed costs"]
    for cost in report["fixed_costs"]:
        number = "unknown" if cost["bytes"] is None else size(cost["bytes"])
        number += "" if cost["known"] or cost["bytes"] is None else "?"
        where = "included in peak held" if cost["held"] else "in addition to peak held"
        said = f"  {number:>9}  {cost['name']} ({where}): {cost['source']}"
        lines.append(_wrapped(said, width, " " * 13))
    return "\n".join(lines)


def _but_small(small: Optional[dict[str, Any]]) -> str:
    """That requests differ which are too small to count."""
    if not small:
        return ""
    return (
        f", but for some of less than {size(small['least'])}, first at {small['line']}; the peaks "
        "are equal to 0.1%"
    )


def _trust(report: dict[str, Any], width: int) -> str:
    trust = report["trust"]
    lines = ["Can it be trusted?"]
    if trust["reasons"]:
        by_host = trust.get("by_host", False)
        for reason in trust["reasons"]:
            lines.append(_wrapped(f"  NO: {reason}", width, "      "))
        parted = trust["difference"]
        if parted is not None:
            peaks = trust["peaks"]
            if not by_host:
                lines.append(
                    f"  peak live: {size(peaks['zeros'])} with zeros, {size(peaks['random'])} with "
                    "random values"
                )
            for values, key in (("zeros", "zeros"), ("random values", "random")):
                request = parted[key]
                values = "one run" if by_host and key == "zeros" else values
                values = "another" if by_host and key == "random" else values
                told = "no further request"
                if request is not None:
                    line = request["line"]
                    inside = request["inside"]
                    within = f"in {inside}" if inside else source(line)
                    told = f"{size(request['bytes'])} at {line}  {within}"
                lines.append(_cut(f"  with {values + ':':<14} {told}".rstrip(), width))
    else:
        lines.append(
            _wrapped(
                "  Two runs, with zeros and with random values on the device, made the same "
                f"{trust['requests']:,} requests{_but_small(trust.get('small'))}.",
                width,
                "  ",
            )
        )
    lines += [_wrapped(f"  {said}", width, "  ") for said in scope(report)]
    for answer, count in trust["answered"].items():
        lines.append(
            _wrapped(f"  Answered for the program, {times(count)}: {answer}.", width, "    ")
        )
    if trust["reads"]:
        counted = sum(read["count"] for read in trust["reads"])
        but = " but for the answers above" if trust["answered"] else ""
        said = f"Values read from the device, {times(counted)} (the stand-in invents them{but}):"
        lines.append(_wrapped(f"  {said}", width, "  "))
        rows = trust["reads"][:5]
        for read in rows:
            within = f"  in {read['inside']}" if read["inside"] else ""
            lines.append(
                _cut(f"    {read['line']}  {read['what']} x{read['count']}{within}", width)
            )
        if len(trust["reads"]) > len(rows):
            lines.append(f"    and of {len(trust['reads']) - len(rows)} more (--json)")
    else:
        lines.append("  No line of the program was seen reading values from the device.")
    if trust.get("managed"):
        said = (
            f"Managed memory, {size(trust['managed'])} at most (a paged optimiser's, say), counts "
            "as the host's: a driver keeps of it on the GPU what other memory leaves room for. "
            "What the host reads there without a copy is not seen."
        )
        lines.append(_wrapped(f"  {said}", width, "  "))
    if trust["host_reads"]:
        told = trust["host_reads"]
        lines.append(
            f"  By the stand-in's books: {told['count']} copies to the host, "
            f"{size(told['bytes'])}."
        )
    lines.append(f"  {SILICON}")
    return "\n".join(lines)
