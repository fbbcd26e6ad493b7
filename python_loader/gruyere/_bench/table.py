"""The table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional

from .catalog import PROGRAMS
from .measure import COMPLETED

if TYPE_CHECKING:
    from .compare import Program, Report, Row

MIB, GIB = 1 << 20, 1 << 30


def size(number: int) -> str:
    """Bytes for people."""
    return f"{number / GIB:.2f} GiB" if number >= GIB else f"{number / MIB:.0f} MiB"


def draw(report: Report) -> str:
    """The table, with what its columns mean."""
    on_gpu = not report.machine["stand_in"]
    heads = ["program", "allocator", "peak live", "peak physical", "hold"]
    heads += ["smallest device", "fit"] if report.settings["fit"] else []
    heads += ["host a step", "of default"] + (["a step"] if on_gpu else [])
    lines: list[list[str]] = []
    for program in report.programs:
        for row in program.rows:
            lines.append(_cells(program, row, report.settings["fit"], on_gpu))
    widths = [
        max(len(line[column]) for line in [heads, *lines] if column < len(line))
        for column in range(len(heads))
    ]
    rule = "─" * (sum(widths) + 2 * len(widths) - 2)
    text = [_head(report), "", _line(heads, widths), rule]
    for number, line in enumerate(lines):
        if line[0] and number:
            text.append("")
        text.append(_line(line, widths))
    return "\n".join([*text, rule, *_notes(report, on_gpu)]) + "\n"


def markdown(report: Report) -> str:
    """The table as people post it."""
    on_gpu = not report.machine["stand_in"]
    heads = ["allocator", "peak live", "peak held", "held / live", "against default"]
    heads += ["a step"] if on_gpu else ["host a step"]
    text = []
    for program in report.programs:
        words = " ".join([program.name, *program.arguments])
        text += [f"`{words}` on {_head(report)}", ""]
        text += ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
        default = next((row for row in program.rows if row.allocator == "default"), None)
        for row in program.rows:
            text.append("| " + " | ".join(_posted(program, row, default, on_gpu)) + " |")
        text += ["", _conclusion(program)]
    if not on_gpu:
        text.append(
            "On the stand-in GPU: what is held is exact, times are the host's and say nothing of a "
            "device's."
        )
    return "\n".join(text) + "\n"


_NAMES = {
    "default": "torch, default",
    "expandable": "torch, expandable_segments",
    "gruyere": "**Gruyère**",
}


def _posted(program: Program, row: Row, default: Optional[Row], on_gpu: bool) -> list[str]:
    name = " ".join([_NAMES.get(row.allocator, row.allocator), row.conf]).strip()
    if row.outcome != COMPLETED:
        return [name, f"{row.outcome}: {row.reason}".replace("|", "/"), "", "", "", ""]
    against = "-"
    if default is not None and default.outcome == COMPLETED and default.physical_peak:
        against = f"{100 * (row.physical_peak / default.physical_peak - 1):+.1f}%"
    return [
        name,
        size(program.peak_live),
        size(row.physical_peak),
        _ratio(row.hold_ratio, 3),
        against,
        _time(row.step_ns if on_gpu else row.host_ns_a_step),
    ]


def _conclusion(program: Program) -> str:
    """One sentence on what came out."""
    held = {row.allocator: row.physical_peak for row in program.rows if row.outcome == COMPLETED}
    ours = held.pop("gruyere", None)
    if ours is None or not held:
        return "Not every run completed: there is nothing to compare."
    best, least = min(held.items(), key=lambda item: item[1])
    if ours <= least:
        return f"Gruyère holds {size(least - ours)} less than torch's best ({best})."
    return f"torch's {best} holds {size(ours - least)} less than Gruyère here."


def _cells(program: Program, row: Row, fit: bool, on_gpu: bool) -> list[str]:
    first = row is program.rows[0]
    named = [program.name if first else "", row.name]
    if row.outcome != COMPLETED:
        return [
            *named,
            size(program.peak_live) if first and program.peak_live else "",
            f"{row.outcome.upper()}: {row.reason}",
        ]
    cells = [
        *named,
        size(program.peak_live) if first else "",
        size(row.physical_peak),
        _ratio(row.hold_ratio, 3),
    ]
    if fit:
        cells += [size(row.fit_bytes), _ratio(row.fit_ratio, 3)] if row.fit_bytes else ["-", "-"]
    cells += [_time(row.host_ns_a_step), _ratio(row.host_ratio, 2)]
    return cells + ([_time(row.step_ns)] if on_gpu else [])


def _line(cells: list[str], widths: list[int]) -> str:
    # A reason goes on to the end of the line.
    ended = len(cells) < len(widths)
    parts = [
        cell.ljust(width)
        if column < 2 or (ended and column == len(cells) - 1)
        else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(cells, widths))
    ]
    return "  ".join(parts).rstrip()


def _ratio(number: Optional[float], digits: int) -> str:
    return "-" if number is None else f"{number:.{digits}f}"


def _time(nanoseconds: Optional[float]) -> str:
    return "-" if nanoseconds is None else f"{nanoseconds / 1e6:.1f} ms"


def _head(report: Report) -> str:
    machine = report.machine
    torch = (
        f"torch {machine['torch']}, CUDA {machine['cuda']}" if "torch" in machine else "no torch"
    )
    return f"{machine['device']}, {torch}, {report.seconds:.0f} s"


def _notes(report: Report, on_gpu: bool) -> list[str]:
    held = (
        "the most that the allocator says it held, or that the device had in use at the end of "
        "a step beyond what others used before, if more"
        if on_gpu
        else "by the stand-in's books"
    )
    notes = [
        "peak live        the program's, each block rounded up to 512 B",
        f"peak physical    {held}; hold: / peak live",
    ]
    if report.settings["fit"]:
        least = (
            "what the allocator must be allowed to hold" if on_gpu else "the memory of the stand-in"
        )
        notes.append(
            f"smallest device  {least} for the program to complete, to 0.5% of peak live; fit: "
            "/ peak live"
        )
    host = (
        "until the step has been launched; a step: until the device is done with it"
        if on_gpu
        else "processor time of the real host code; a driver's calls cost next to nothing here"
    )
    runs = report.settings["runs"]
    notes.append(
        f"host a step      {host}. Median of steps, then of {runs} runs; of default: / that of "
        "the same step, median"
    )
    builtin = [program.program for program in report.programs if program.built_in]
    notes += [f"{name:<15}  {PROGRAMS[name]}" for name in builtin]
    return notes


