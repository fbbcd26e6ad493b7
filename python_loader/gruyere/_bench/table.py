"""The result tables."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING, Optional

from .catalog import PROGRAMS
from .measure import COMPLETED, OUT_OF_MEMORY, UNUSED
from .parts import why

if TYPE_CHECKING:
    from .compare import Program, Report, Row

MIB, GIB = 1 << 20, 1 << 30
# Other libraries' share of what is held from which it is told.
_BESIDE = 0.02


def size(number: int) -> str:
    """A number of bytes as text."""
    return f"{number / GIB:.2f} GiB" if number >= GIB else f"{number / MIB:.0f} MiB"


def draw(report: Report) -> str:
    """The table, with an explanation of its columns."""
    on_gpu = not report.machine["stand_in"]
    heads = ["program", "allocator", "peak live", "peak physical", "hold"]
    heads += ["smallest device", "fit"] if report.settings["fit"] else []
    heads += ["host a step", "of default"] + (["a step"] if on_gpu else [])
    lines: list[list[str]] = []
    failed: list[str] = []
    for program in report.programs:
        for row in program.rows:
            lines.append(_cells(program, row, report.settings["fit"], on_gpu))
            if row.outcome != COMPLETED:
                failed.append(wrapped(f"{program.name}, {_failure(row)}"))
    text = [_head(report), ""]
    for program in report.programs:
        if not program.comparable:
            text += [wrapped(f"{program.name}: {different(program)}"), ""]
    rows = _fitting(heads, lines)
    rule = "─" * max(map(len, rows))
    top = 1 if rows[0].startswith("program") else 2
    text += [*rows[:top], rule, *rows[top:], rule]
    return "\n".join([*text, *failed, *_notes(report, on_gpu)]) + "\n"


def _fitting(heads: list[str], lines: list[list[str]]) -> list[str]:
    """The table in the first form that fits the terminal: as it is; with each program on a line
    above its rows and heads of two lines; with less room between the columns as well."""
    # A file has no width, and COLUMNS counts for it too.
    width = shutil.get_terminal_size((100, 24)).columns
    rows = _aligned([heads], lines, 2)
    if max(map(len, rows)) <= width:
        return rows
    parted = [head.rpartition(" ") for head in heads[1:]]
    double = [[above for above, _, _ in parted], [below for _, _, below in parted]]
    # Settings stand below the allocator that has them.
    lines = [[line[0], line[1].replace("gruyere ", "+ "), *line[2:]] for line in lines]
    for gap in (2, 1):
        rows = _aligned([["", *of] for of in double], lines, gap, is_apart=True)
        if max(map(len, rows)) <= width:
            break
    return rows


def _aligned(
    heads: list[list[str]], lines: list[list[str]], gap: int, is_apart: bool = False
) -> list[str]:
    """The rows of the table, with an empty line between two programs. `is_apart`: the first column,
    the program, is a line of its own."""
    first = 1 if is_apart else 0
    # The outcome of a row without figures extends to the end of the line.
    cells = [*heads, *(line if len(line) == len(heads[0]) else line[:-1] for line in lines)]
    widths = [
        max((len(line[column]) for line in cells if column < len(line)), default=0)
        for column in range(first, len(heads[0]))
    ]
    text = [_line(head[first:], widths, gap, 2 - first) for head in heads]
    for number, line in enumerate(lines):
        if line[0] and number:
            text.append("")
        if line[0] and is_apart:
            text.append(line[0])
        text.append(_line(line[first:], widths, gap, 2 - first))
    return text


# The width of text around the Markdown table.
_WIDTH = 80
# The most characters of a reason below a table.
_REASON = 200


def markdown(report: Report) -> str:
    """The table in Markdown, aligned so that it is readable on a terminal too."""
    on_gpu = not report.machine["stand_in"]
    heads = ["allocator", "peak live", "peak held", "over live", "vs. torch"]
    heads += ["a step"] if on_gpu else ["host step"]
    text = []
    for program in report.programs:
        words = " ".join([program.name, *program.arguments])
        text += [wrapped(_verdict(program)), ""]
        text += [wrapped(f"`{words}` on {_head(report)}"), ""]
        default = next((row for row in program.rows if row.allocator == "default"), None)
        rows = [_posted(program, row, default, on_gpu) for row in program.rows]
        widths = [max(map(len, column)) for column in zip(heads, *rows)]
        text.append(_barred(heads, widths))
        rules = ["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]
        text.append(f"|{'|'.join(rules)}|")
        text += [_barred(row, widths) for row in rows]
        failed = [wrapped(_failure(row)) for row in program.rows if row.outcome != COMPLETED]
        beside = [wrapped(line) for line in _beside(program.rows, on_gpu)]
        ignored = [wrapped(line) for line in _ignored(program)]
        set_to = [
            wrapped(f"Gruyère's row has the settings of GRUYERE_CONF here: {row.conf}.")
            for row in program.rows
            if row.conf
        ]
        ranks = report.settings.get("ranks")
        alone = [] if ranks is None else [wrapped(_ALONE.format(ranks=ranks))]
        below = [*failed, *alone, *beside, *set_to, *ignored]
        text += ["", *below] if below or not on_gpu else []
    if not on_gpu:
        rows = [row for program in report.programs for row in program.rows]
        if any(row.outcome != COMPLETED and row.reason not in UNUSED for row in rows):
            text += [wrapped(_INVENTED), ""]
        text.append(
            wrapped(
                f"On the {report.machine['device']}: memory figures are exact, without the unknown "
                "workspaces of NVIDIA's libraries (cuDNN); times are those of the host and do not "
                "predict a GPU's."
            )
        )
    return "\n".join(text) + "\n"


_ALONE = (
    "Of {ranks} ranks the first ran, beside others that exchange nothing: one that holds another "
    "part of the model (a stage of a pipeline) may differ."
)
_INVENTED = (
    "The stand-in GPU invents what a program reads from the device, and a failure may come from "
    "such a value: `gruyere dryrun` names the lines that read one."
)
_NAMES = {
    "default": "torch default",
    "expandable": "torch expandable",
    "gruyere": "**Gruyère**",
}


def _barred(cells: list[str], widths: list[int]) -> str:
    padded = [
        cell.rjust(width) if column else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(cells, widths))
    ]
    return f"| {' | '.join(padded)} |"


def show(command: str, text: str) -> bool:
    """Print the answer of `gruyere COMMAND`; returns whether it is printed, and reports why not. A
    reader that has seen enough is no failure."""
    try:
        print(text, end="", flush=True)
        return True
    except OSError as error:
        # Python would try once more at its end, and fail with a message of its own.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if isinstance(error, BrokenPipeError):
            return True
        print(
            f"gruyere {command}: standard output: {error.strerror}; send it to a file system with "
            "free space, or to a pipe",
            file=sys.stderr,
        )
        return False


def wrapped(text: str) -> str:
    """Sentences in lines of 80 columns."""
    return textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


def called(row: Row) -> str:
    """The row's name in a sentence."""
    return f"{_titled(row).strip('*')} {row.conf}".strip()


def _titled(row: Row) -> str:
    """The row's name in the Markdown table, without its settings, which may be long."""
    return _NAMES.get(row.allocator, row.allocator)


def _failure(row: Row) -> str:
    """Why a row has no figures, cut to about two lines."""
    said = f"{called(row)}: {row.outcome}: {row.reason}"
    return said if len(said) <= _REASON else f"{said[: _REASON - 1].rstrip()}…"


def _posted(program: Program, row: Row, default: Optional[Row], on_gpu: bool) -> list[str]:
    if row.outcome != COMPLETED:
        # The outcome fits into a cell; the reason is printed below the table.
        return [_titled(row), "-", _SHORT.get(row.outcome, row.outcome), "-", "-", "-"]
    against = "-"
    is_base = default is not None and default.outcome == COMPLETED and program.comparable
    if default is not None and is_base and default.physical_peak:
        against = f"{100 * (row.physical_peak / default.physical_peak - 1):+.1f}%"
    over = "-" if row.hold_ratio is None else f"{100 * (row.hold_ratio - 1):+.1f}%"
    return [
        _titled(row),
        size(_live(program, row)),
        size(row.physical_peak),
        over,
        against,
        # Of a program that marks no step, the host's time is that of the whole run.
        _time(row.step_ns if on_gpu else row.host_ns_a_step if row.steps else None),
    ]


_SHORT = {OUT_OF_MEMORY: "ran out"}
_TORCHS = ("default", "expandable")


def _live(program: Program, row: Row) -> int:
    """The peak of live bytes: the program's, or the row's if it did other work than another."""
    return row.allocated_peak if program.peak_live is None else program.peak_live


def different(program: Program) -> str:
    """That the rows of a program did different work, in what, and what helps."""
    what = "; ".join(program.differs)
    return (
        f"The runs did different work, so their figures do not compare: {what}. "
        "Seed what the program draws at random (torch.manual_seed; random.seed and "
        "numpy.random.seed if it uses them), and fix its batch and its steps. It may also size "
        "itself by the free memory, or by an out-of-memory error that it catches: set the size."
    )


def _verdict(program: Program) -> str:
    """Which allocator holds least, and by how much; if it is not Gruyère, the reason and what to
    set. Runs that did not complete are not compared, since what they would have held is unknown,
    nor are runs that did different work."""
    if not program.comparable:
        return different(program)
    completed = [row for row in program.rows if row.outcome == COMPLETED]
    missing = [
        f"{called(row)} {'ran out of memory' if row.outcome == OUT_OF_MEMORY else 'failed'}"
        for row in program.rows
        if row.outcome != COMPLETED and row.allocator in _TORCHS
    ]
    ours = next((row for row in completed if row.allocator == "gruyere"), None)
    others = [row for row in completed if row is not ours]
    if ours is None:
        done = " and ".join(called(row) for row in others)
        return (
            f"Gruyère did not complete{f': {done} did' if done else ', nor did torch'}. There is "
            "nothing to compare."
        )
    if not others:
        return f"Gruyère completed, and nothing else did: {' and '.join(missing)}."
    best = min(others, key=lambda row: row.physical_peak)
    of_these = f"{' and '.join(missing)}. Of the others, " if missing else ""
    held, difference = size(ours.physical_peak), ours.physical_peak - best.physical_peak
    by = f"{size(abs(difference))} ({abs(ours.physical_peak / best.physical_peak - 1):.1%})"
    if difference == 0:
        return f"{of_these}Gruyère holds as little as {called(best)}: {held}."
    if difference < 0:
        next_best = "less than" if missing else "less than the next,"
        return f"{of_these}Gruyère holds least: {held}, {by} {next_best} {called(best)}."
    found = why(ours.parts, difference)
    reason = ""
    if found is not None:
        reason = f": {found[0].says.format(size(found[1]))}. {found[0].remedy.rstrip('.')}"
    return (
        f"{of_these}{called(best)} holds least: {size(best.physical_peak)}. Gruyère holds {by} "
        f"more{reason}."
    )


def _cells(program: Program, row: Row, fit: bool, on_gpu: bool) -> list[str]:
    first = row is program.rows[0]
    named = [program.name if first else "", row.name]
    if row.outcome != COMPLETED:
        return [
            *named,
            size(program.peak_live) if first and program.peak_live else "",
            row.outcome.upper(),
        ]
    cells = [
        *named,
        size(_live(program, row)) if first or not program.comparable else "",
        size(row.physical_peak),
        _ratio(row.hold_ratio, 3),
    ]
    if fit:
        cells += [size(row.fit_bytes), _ratio(row.fit_ratio, 3)] if row.fit_bytes else ["-", "-"]
    cells += [_time(row.host_ns_a_step), _ratio(row.host_ratio, 2)]
    return cells + ([_time(row.step_ns)] if on_gpu else [])


def _line(cells: list[str], widths: list[int], gap: int, left: int) -> str:
    """A row of cells, `gap` blanks apart; the first `left` ones and an outcome are left-aligned."""
    ended = len(cells) < len(widths)
    parts = [
        cell.ljust(width)
        if column < left or (ended and column == len(cells) - 1)
        else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(cells, widths))
    ]
    return (" " * gap).join(parts).rstrip()


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


def _beside(rows: list[Row], on_gpu: bool) -> list[str]:
    """How much of the device was in use that no allocator reports: a line, if a run completed; on
    the stand-in, which counts it as held, if it is much."""
    completed = [row for row in rows if row.outcome == COMPLETED]
    grown = [row.beside_peak for row in completed]
    if not grown:
        return []
    least, most = size(min(grown)), size(max(grown))
    by = most if least == most else f"{least} to {most}"
    if not on_gpu:
        # The libraries take the same beside each allocator.
        if any(row.beside_peak <= row.physical_peak * _BESIDE for row in completed):
            return []
        return [
            f"Of what is held, {by} or more is no allocator's: other libraries of the program took "
            "it from the driver (CuPy, numba, NCCL)."
        ]
    return [
        f"Beside what the allocator held, the device's memory in use grew by {by}: libraries and "
        "kernels, and another process if one used the GPU meanwhile."
    ]


def _ignored(program: Program) -> list[str]:
    """A line about the allocator that the program chooses itself, if it does."""
    if not program.left_out:
        return []
    return [
        f"Ignored in {program.name}: {'; '.join(program.left_out)}. Each row has the allocator and "
        "the settings that it names."
    ]


def _notes(report: Report, on_gpu: bool) -> list[str]:
    held = "the most that the allocator held" if on_gpu else "by the stand-in's books"
    notes = [
        _note("peak live", "of the program, each block rounded up to 512 B"),
        _note("peak physical", f"{held}; hold: peak physical / peak live"),
    ]
    if report.settings["fit"]:
        least = (
            "least memory that the allocator must be allowed to hold"
            if on_gpu
            else "least memory of the stand-in"
        )
        notes.append(
            _note(
                "smallest device",
                f"{least} for the program to complete, to 0.5% of peak live; fit: smallest device "
                "/ peak live",
            )
        )
    host = (
        "time until the step is launched; a step: time until the device has finished it"
        if on_gpu
        else "processor time of the real host code; driver calls cost almost nothing here"
    )
    runs = report.settings["runs"]
    of_runs = f", then of {runs} runs" if runs > 1 else ""
    notes.append(
        _note(
            "host a step",
            f"{host}. Median of steps{of_runs}; of default: ratio to the same step under default, "
            "median",
        )
    )
    rows = [row for program in report.programs for row in program.rows]
    lines = _beside(rows, on_gpu)
    for program in report.programs:
        lines += _ignored(program)
    notes += [wrapped(line) for line in lines]
    builtin = [program.program for program in report.programs if program.built_in]
    notes += [_note(name, PROGRAMS[name]) for name in builtin]
    return notes


def _note(head: str, text: str) -> str:
    """A line of the legend, wrapped below itself."""
    below = " " * 17
    return textwrap.fill(
        text, _WIDTH, initial_indent=head.ljust(17), subsequent_indent=below,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
