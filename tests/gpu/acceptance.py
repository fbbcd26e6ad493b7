#!/usr/bin/env python3
"""Gruyère's acceptance on a real GPU: one table, one JSON file, under eight minutes.

    python tests/gpu/acceptance.py [--quick] [--only PARTS] [--limit SECONDS] [--json FILE]

Needs torch with CUDA and libgruyere.so (`cargo build --release`, or $GRUYERE_LIBRARY). README.md
says what each part shows. On the phantom, which keeps books and runs no kernel, the same parts run,
and the table says what was not judged.

Exits with 0 where nothing failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Sequence, TextIO, Tuple

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from machine import ALLOCATORS, GIB, library_file  # noqa: E402

# Seconds to tell what machine this is.
FACTS_LIMIT = 60.0

PASSED, FAILED, BOOKS, MEASURED, SKIPPED = "passed", "FAILED", "books only", "measured", "skipped"


class PartFailed(Exception):
    pass


@dataclass
class Row:
    """A line of the table."""

    part: str
    what: str
    verdict: str
    result: str


@dataclass
class Process:
    """One that was run for a part."""

    part: str
    program: str
    allocator: str
    settings: Dict[str, Any]
    # What it said there, beside the JSON.
    stderr: str
    ended: str = ""
    seconds: float = 0.0


@dataclass
class Report:
    # Where the numbers go.
    document: Path
    quick: bool
    facts: Dict[str, Any] = field(default_factory=dict)
    rows: List[Row] = field(default_factory=list)
    processes: List[Process] = field(default_factory=list)
    details: Dict[str, Any] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    # The part that runs, its seconds, and when they are over.
    part: str = ""
    limit: float = 0.0
    deadline: float = 0.0

    @property
    def kernels(self) -> bool:
        return bool(self.facts["kernels_run"])

    @property
    def stderr(self) -> Path:
        """The folder of what the processes say on stderr."""
        return self.document.with_suffix(".stderr")

    def clear(self) -> None:
        """Makes the folder, and takes out of it what an earlier run has left."""
        self.stderr.mkdir(parents=True, exist_ok=True)
        for file in self.stderr.glob("*.txt"):
            file.unlink()

    def begin(self, part: str, limit: float) -> None:
        self.part, self.limit = part, limit
        self.deadline = time.monotonic() + limit

    def add(self, what: str, verdict: str, result: str) -> None:
        self.rows.append(Row(self.part, what, verdict, result))
        print(f"  ({self.part}) {what}: {verdict}; {result}", file=sys.stderr, flush=True)

    @contextmanager
    def line(self, what: str) -> Iterator[None]:
        """What fails here is one line of the table, and the part goes on."""
        try:
            yield
        except PartFailed as failure:
            self.add(what, FAILED, str(failure))

    def judged(self) -> str:
        """The verdict of what held: with kernels it is judged whole, without only its books are."""
        return PASSED if self.kernels else BOOKS

    def run(
        self,
        program: str,
        allocator: str,
        /,
        share: float = 1.0,
        tool: Sequence[str] = (),
        **settings: Any,
    ) -> Dict[str, Any]:
        """Runs one of the part's programs in a process of its own, under `tool` where one is given,
        and hands back its answer. It has what is left of the part's time, and no more than `share`
        of the whole, so that one that hangs leaves time for the others. Raises PartFailed with the
        end of what it said."""
        name = "-".join(
            word
            for word in (f"{len(self.processes) + 1:02}", self.part, program, allocator)
            if word
        )
        file = self.stderr / f"{name}.txt"
        process = Process(
            self.part, program, allocator, settings, str(file.relative_to(self.document.parent))
        )
        self.processes.append(process)
        began = time.monotonic()
        seconds = min(self.deadline - began, share * self.limit)
        command = [
            *tool,
            sys.executable,
            str(HERE / f"{program}.py"),
            allocator,
            json.dumps(settings),
        ]
        try:
            # Straight into the file: what a process says before it hangs or is killed is there.
            with file.open("w") as stderr:
                out, process.ended = started(command, allocator, stderr, seconds)
        finally:
            process.seconds = time.monotonic() - began
        if process.ended != "exit code 0":
            lines = [line for line in file.read_text(errors="replace").splitlines() if line.strip()]
            raise PartFailed(
                f"{process.ended}: {lines[-1] if lines else 'no message'} (stderr: {file})"
            )
        answers = [line for line in out.splitlines() if line.startswith("{")]
        if not answers:
            raise PartFailed(f"it gave no answer (stderr: {file})")
        answer: Dict[str, Any] = json.loads(answers[-1])
        if "failed" in answer:
            raise PartFailed(answer["failed"])
        return answer


def started(command: List[str], allocator: str, stderr: TextIO, seconds: float) -> Tuple[str, str]:
    """Runs a process to its end: its stdout, and how it ended."""
    if seconds <= 0:
        return "", "not started, the time of the part is over"
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith("PYTORCH_")
    }
    if ALLOCATORS[allocator]:
        environment["PYTORCH_CUDA_ALLOC_CONF"] = ALLOCATORS[allocator]
    child = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        start_new_session=True,
    )
    try:
        out, _ = child.communicate(timeout=seconds)
    except BaseException as error:
        # With all that it has started: a tool's program is a process of its own. What sits in the
        # driver after that is left behind.
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            child.communicate(timeout=10)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return "", f"took more than {seconds:.0f} s"
    if child.returncode < 0:
        return out, f"killed by {signal.Signals(-child.returncode).name}"
    return out, f"exit code {child.returncode}"


def losses(report: Report) -> None:
    for what, sharded in (("one seeded training", False), ("the same under FSDP2", True)):
        with report.line(what):
            compare_losses(report, what, sharded)


def compare_losses(report: Report, what: str, sharded: bool) -> None:
    steps = 6 if report.quick else 30
    answers = {
        allocator: report.run("losses", allocator, steps=steps, sharded=sharded)
        for allocator in ("native", "gruyere")
    }
    report.details["losses_sharded" if sharded else "losses"] = answers
    native, ours = answers["native"], answers["gruyere"]
    same = sum(a == b for a, b in zip(native["losses"], ours["losses"]))
    what = f"{what}, native and Gruyère"
    if not report.kernels:
        report.add(what, BOOKS, f"{steps} steps ran under both; losses need kernels")
    elif native["losses"] == ours["losses"] and native["weights"] == ours["weights"]:
        report.add(
            what, PASSED, f"{same} of {steps} losses and the weights are the same, bit for bit"
        )
    else:
        report.add(
            what,
            FAILED,
            f"{same} of {steps} losses are the same; weights the same: "
            f"{native['weights'] == ours['weights']}",
        )


def canaries(report: Report) -> None:
    seconds = 3 if report.quick else 30
    for name, streams, destroy_streams in (
        ("canaries", "on streams that last", False),
        ("canaries_destroyed", "while streams are destroyed", True),
    ):
        what = f"canaries for {seconds} s, {streams}"
        with report.line(what):
            answer = report.run(
                "canaries",
                "gruyere",
                share=1 / 3,
                seconds=seconds,
                threads=2,
                destroy_streams=destroy_streams,
            )
            report.details[name] = answer
            mismatches = (
                f"{answer['wrong']} mismatches"
                if report.kernels
                else "no two live blocks met, nothing was left; patterns need kernels"
            )
            report.add(what, report.judged(), f"{mismatches}; {moves_of(answer)}")
    # With a hook left out on purpose: what the canaries would say of a wrong allocator.
    what = "the same with record_stream left out"
    with report.line(what):
        planted = report.run(
            "canaries",
            "gruyere",
            share=1 / 3,
            seconds=2 if report.quick else 5,
            record_stream=False,
        )
        report.details["canaries_planted"] = planted
        result = (
            f"{planted['wrong']} mismatches seen, as should be"
            if report.kernels
            else "ran; patterns need kernels"
        )
        if report.kernels and not planted["wrong"]:
            result = "none seen: this device may be too fast for the canaries, so (b) says less"
        report.add(what, MEASURED if report.kernels else BOOKS, result)
    # And of one that is right: a fault of the test's own would show here.
    what = "the same under torch's own allocator"
    with report.line(what):
        native = report.run(
            "canaries", "native", share=1 / 3, seconds=2 if report.quick else 10, threads=2
        )
        report.details["canaries_native"] = native
        mismatches = f"{native['wrong']} mismatches" if report.kernels else "ran"
        report.add(what, report.judged(), f"{mismatches}; {moves_of(native)}")
    memcheck(report)


def moves_of(answer: Dict[str, Any]) -> str:
    moves = answer["moves"]
    return (
        f"{moves.get('allocate', 0):,} blocks, {moves.get('hand_over', 0):,} handed to another "
        f"stream, {moves['streams_destroyed']} streams"
        f" destroyed, {moves['captures']} captures, {moves['replays']:,} replays, "
        f"{moves['released_in_flight']} released in flight"
    )


def memcheck(report: Report) -> None:
    """What compute-sanitizer says of the canaries, where it is installed. A tool that cannot work
    here, or not in time, has said nothing of the allocator."""
    what = "canaries under compute-sanitizer's memcheck"
    tool = shutil.which("compute-sanitizer")
    if not tool:
        report.add(what, SKIPPED, "compute-sanitizer is not installed")
        return
    log = report.stderr / "memcheck.txt"
    # The library asks for what a driver may refuse, to find out: such calls are no errors. For
    # backtraces of the host the tool keeps Python's frames, and all tensors in them.
    options = (
        "--show-backtrace",
        "device",
        "--tool",
        "memcheck",
        "--report-api-errors",
        "no",
        "--error-exitcode",
        "86",
        "--log-file",
        str(log),
    )
    try:
        answer = report.run(
            "canaries", "gruyere", share=1 / 3, tool=(tool, *options), seconds=3, threads=1
        )
    except PartFailed as failure:
        said = log.read_text(errors="replace") if log.exists() else ""
        # The tool's last line, where it has come to its end.
        if "ERROR SUMMARY" in said:
            report.add(what, FAILED, f"{failure} (memcheck: {log})")
        else:
            report.add(what, SKIPPED, f"the tool gave no verdict: {failure}")
        return
    report.details["canaries_memcheck"] = answer
    report.add(what, report.judged(), f"no error; {moves_of(answer)}")


def graphs(report: Report) -> None:
    answer = report.run("graphs", "gruyere", rounds=8 if report.quick else 40)
    report.details["graphs"] = answer
    result = (
        f"{answer['steps']} replays among {answer['eager_blocks']:,} eager blocks; all memory "
        "of graphs came back"
    )
    if report.kernels:
        result += f"; largest difference to eager training {answer['largest_difference']:.1e}"
    report.add(
        "a captured training step, graphed callables, graphs in one pool", report.judged(), result
    )


def out_of_memory(report: Report) -> None:
    answer = report.run("out_of_memory", "gruyere", allowed=GIB)
    report.details["out_of_memory"] = answer
    report.add(
        "out of memory and recovery at 1 GiB",
        report.judged(),
        f"{answer['filled']:.1%} of it could be filled; batches tried {answer['tried']}; "
        f"{answer['threads_out_of_memory']} threads ran out at once",
    )


@dataclass(frozen=True)
class Part:
    name: str
    # Seconds for all of its processes together, after which it is taken for hung. Ample: a shared
    # machine without a GPU is slow.
    limit: float
    run: Callable[[Report], None]


# In the order of what they decide: whether data is lost, whether a program's numbers and its graphs
# are right, and whether it goes on where memory runs out.
PARTS = {
    "b": Part("canaries", 230, canaries),
    "a": Part("the same losses", 75, losses),
    "c": Part("graphs among eager work", 75, graphs),
    "d": Part("out of memory", 75, out_of_memory),
}


def table(report: Report) -> str:
    heads = ("part", "what", "verdict", "result")
    lines = [[row.part, row.what, row.verdict, row.result] for row in report.rows]
    widths = [max(len(line[column]) for line in [list(heads), *lines]) for column in range(3)]
    rows = [list(heads), ["-" * width for width in widths] + ["-" * 6], *lines]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths)), line[3]]).rstrip()
        for line in rows
    )


def main() -> int:
    letters = "".join(sorted(PARTS))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a short form of each part: a minute or two, for continuous integration",
    )
    parser.add_argument(
        "--only",
        default=letters,
        metavar="PARTS",
        help="letters of the parts to run, e.g. abc (default: all)",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=float("inf"),
        metavar="SECONDS",
        help="no part may take longer (each has its own limit too)",
    )
    parser.add_argument(
        "--json",
        type=Path,
        default=Path("gpu-acceptance.json"),
        metavar="FILE",
        help=(
            "where the numbers go (default: %(default)s); what the parts say on stderr goes "
            "into a folder beside it"
        ),
    )
    arguments = parser.parse_args()
    unknown = set(arguments.only) - set(PARTS)
    if unknown:
        parser.error(
            f"--only {arguments.only}: there is no part {', '.join(sorted(unknown))}; the "
            f"parts are {letters}"
        )
    if not library_file().is_file():
        parser.error(
            f"{library_file()} is missing: run `cargo build --release`, or set GRUYERE_LIBRARY "
            "to a built libgruyere.so"
        )
    # Who is told to end takes the running process along.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    report = Report(arguments.json, arguments.quick)
    report.clear()
    report.begin("", FACTS_LIMIT)
    try:
        report.facts = report.run("facts", "native")
    except PartFailed as failure:
        print(f"this machine cannot be tested: {failure}", file=sys.stderr)
        return 2
    for letter, part in PARTS.items():
        if letter not in arguments.only:
            continue
        report.begin(letter, min(part.limit, arguments.limit))
        with report.line(part.name):
            part.run(report)
        # After each part, so that a crash later loses nothing.
        write(report)
    failed = sum(row.verdict == FAILED for row in report.rows)
    unjudged = sum(row.verdict == BOOKS for row in report.rows)
    facts = report.facts
    print(
        f"Gruyère on {facts['device']} ({facts['total_memory'] / GIB:.1f} GiB), torch "
        f"{facts['torch']}, CUDA {facts['cuda']}\n"
    )
    print(table(report))
    print(f"\n{len(report.rows)} lines, {failed} failed, {time.monotonic() - report.began:.0f} s.")
    print(
        f"The numbers are in {report.document}, and what the processes said on stderr is in "
        f"{report.stderr}."
    )
    if unjudged:
        print(
            f'{unjudged} lines say "{BOOKS}": no kernel runs on this machine, so bytes were '
            'counted, and no value and no time was judged.'
        )
    return 1 if failed else 0


def write(report: Report) -> None:
    content = {
        "version": 1,
        "machine": report.facts,
        "quick": report.quick,
        "seconds": time.monotonic() - report.began,
        "rows": [vars(row) for row in report.rows],
        "processes": [vars(process) for process in report.processes],
        "details": report.details,
    }
    whole = report.document.with_name(report.document.name + ".part")
    whole.write_text(json.dumps(content, indent=1) + "\n")
    whole.replace(report.document)


if __name__ == "__main__":
    sys.exit(main())
