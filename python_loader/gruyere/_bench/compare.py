"""The comparison: runs the programs under each allocator in turn, searches for the smallest device,
and makes the report."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Callable, NoReturn, Optional

from .. import _launch
from .._errors import GruyereError
from .._sandbox import Box, Folder, exit_on_signals
from .._sandbox import choose as sandbox
from . import table
from .catalog import PROGRAMS
from .machine import Machine, check_alone, choose
from .measure import COMPLETED, FAILED, FAULTS, OUT_OF_MEMORY, Result
from .runners import TORCH_CONF, Contender, Going, Launch, Server, run_launch
from .work import differences

# Exit codes, as in `gruyere bench`.
_CODES = {COMPLETED: 0, FAILED: 1, FAULTS: 3, OUT_OF_MEMORY: 4}
WRONG_ARGUMENTS = 2
BENCH, COMPARE = "bench --torch", "compare"
# The default number of steps, and the number of first steps that are not timed, because they load
# kernels and take memory.
STEPS = 12
ALL = "all"
FIRST_STEPS = 2
# The search for the smallest device ends within this share of the program's peak of live bytes.
FIT = 0.005
PAGE = 2 << 20


@dataclass
class Row:
    """A program under one allocator."""

    allocator: str
    conf: str
    outcome: str = COMPLETED
    reason: str = ""
    steps: int = 0
    allocated_peak: int = 0
    requested_peak: int = 0
    reserved_peak: int = 0
    physical_peak: int = 0
    beside_peak: int = 0
    hold_ratio: Optional[float] = None
    retries: int = 0
    caught: int = 0
    fit_bytes: Optional[int] = None
    fit_ratio: Optional[float] = None
    fit_tries: list[dict[str, Any]] = field(default_factory=list)
    host_ns_a_step: Optional[float] = None
    host_ratio: Optional[float] = None
    host_ns_of_runs: list[float] = field(default_factory=list)
    step_ns: Optional[float] = None
    parts: dict[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.allocator} {self.conf}".strip()


@dataclass
class Program:
    """A program and its rows."""

    program: str
    arguments: list[str]
    peak_live: Optional[int] = 0
    """None if the rows are not comparable: each has its own (`allocated_peak`)."""
    rows: list[Row] = field(default_factory=list)
    module: bool = False
    """Whether `program` is the name of a module, not of a built-in program or a script."""
    left_out: list[str] = field(default_factory=list)
    """The program's own choices of an allocator, which were ignored."""
    comparable: bool = True
    """Whether the completed rows did the same work."""
    differs: list[str] = field(default_factory=list)
    """What differs between the rows, if they are not comparable."""

    @property
    def name(self) -> str:
        """The program as given to python."""
        return f"-m {self.program}" if self.module else self.program

    @property
    def built_in(self) -> bool:
        return not self.module and self.program in PROGRAMS


@dataclass
class Report:
    """All results. It has a version, so that readers can refuse versions that they do not know."""

    machine: dict[str, Any]
    settings: dict[str, Any]
    programs: list[Program] = field(default_factory=list)
    seconds: float = 0.0

    def to_json(self) -> str:
        return (
            json.dumps({"schema": "gruyere.bench.torch", "version": 1, **asdict(self)}, indent=1)
            + "\n"
        )

    def code(self) -> int:
        codes = [_CODES[row.outcome] for program in self.programs for row in program.rows]
        # Figures of different work are none of a comparison.
        codes += [_CODES[FAILED] for program in self.programs if not program.comparable]
        return max(codes, default=0)


# `gruyere compare` is a short form of `bench --torch`, with these arguments.
_OF_COMPARE = {"allocators": ["default", "expandable", "gruyere"], "no_fit": True, "runs": 1}


def bench(text: str) -> None:
    """`gruyere bench --torch`."""
    asked = json.loads(text)
    if asked["list"]:
        names = "".join(f"{name:<12} {what}\n" for name, what in PROGRAMS.items())
        if not table.show(BENCH, names):
            sys.exit(_CODES[FAILED])
        return
    if not asked["module"]:
        asked["program"] = asked["program"] or list(PROGRAMS)
    _end({**asked, "python_options": []}, BENCH)


def compare(text: str) -> None:
    """`gruyere compare`."""
    asked = json.loads(text)
    script, module = asked.get("script"), asked.get("module")
    # A file of the user, even if it has the name of a built-in program.
    script = f"./{script}" if script in PROGRAMS else script
    # What the advice of one comparison sets counts in the next.
    conf = os.environ.get("GRUYERE_CONF", "").strip()
    _end({
        **asked, **_OF_COMPARE, "program": [script] if script is not None else [],
        "module": [module] if module is not None else [],
        "conf": [conf] if conf else [],
    }, COMPARE)  # fmt: skip


def _end(request: dict[str, Any], command: str) -> NoReturn:
    """Make the comparison, and end with its exit code."""
    exit_on_signals()
    try:
        sys.exit(Comparison(request, command).run())
    except GruyereError as error:
        print(f"gruyere {command}: {error}", file=sys.stderr)
        sys.exit(WRONG_ARGUMENTS)
    except KeyboardInterrupt:
        sys.exit(130)


def checked(request: dict[str, Any], command: str) -> list[Contender]:
    """The requested rows. Raises GruyereError if the request is invalid."""
    for program in request["program"]:
        if command == COMPARE:
            _launch._check_script(program)
        elif program not in PROGRAMS and not Path(program).is_file():
            raise GruyereError(
                f"--program {program}: neither a built-in program ({', '.join(PROGRAMS)}) nor "
                "a file"
            )
    for module in request["module"]:
        _launch._check_module(module)
    unknown = [name for name in request["allocators"] if name not in TORCH_CONF]
    if unknown:
        raise GruyereError(
            f"--allocators {','.join(unknown)}: expected some of {', '.join(TORCH_CONF)}"
        )
    own = request["module"] or set(request["program"]) - set(PROGRAMS)
    if request["arguments"] and not own:
        raise GruyereError(
            "arguments after -- are for scripts and modules, but all programs are built in: "
            f"{' '.join(request['arguments'])}"
        )
    if request["conf"] and "gruyere" not in request["allocators"]:
        raise GruyereError(
            f"--conf {request['conf'][0]}: configures Gruyère, which --allocators leaves out"
        )
    if "gruyere" in request["allocators"]:
        from .._native.conf import check

        for conf in request["conf"]:
            check(conf)
    contenders = []
    for name in dict.fromkeys(request["allocators"]):
        confs = _confs(request, command) if name == "gruyere" else [""]
        contenders += [Contender(name, conf) for conf in confs]
    return contenders


def _confs(request: dict[str, Any], command: str) -> list[str]:
    """The settings of Gruyère's rows. In `compare` it has one row only."""
    confs: list[str] = request["conf"]
    return confs or [""] if command == COMPARE else ["", *confs]


class Comparison:
    def __init__(self, request: dict[str, Any], command: str) -> None:
        self.request = request
        self.command = command
        self.contenders = checked(request, command)
        self.json: Optional[str] = request["json"]
        if self.json not in (None, "-"):
            _check_writable(Path(self.json))
        self.began = time.monotonic()
        # For the user's own programs.
        self.box: Optional[Box] = None
        if request.get("ranks") is not None and not request["stand_in"]:
            raise GruyereError(
                f"--ranks {request['ranks']}: the other ranks exchange nothing, and a GPU would "
                "compute with that: add --stand-in, or name no --ranks"
            )
        self.going = Going()

    def run(self) -> int:
        with Folder("bench") as folder:
            if self.request["stand_in"]:
                check_alone()
            machine = choose(self.request["stand_in"], self.request["beside"], folder)
            if self.request["module"] or set(self.request["program"]) - set(PROGRAMS):
                self.box = sandbox(folder, self.request["sandbox"])
                said = table.wrapped(f"gruyere {self.command}: {self.box.said()}")
                print(said, file=sys.stderr, flush=True)
            # Servers run only built-in programs. Without any, one server reports torch's version.
            served = (
                self.contenders
                if set(self.request["program"]) & set(PROGRAMS)
                else self.contenders[:1]
            )
            servers = [Server(contender, machine, folder) for contender in served]
            try:
                report = self._compare(machine, servers, folder)
            except BaseException:
                self._stop(servers)
                raise
            finally:
                for server in servers:
                    server.close()
        # Clear the line of progress before the table.
        self._progress("")
        draw = table.markdown if self.command == COMPARE else table.draw
        said = report.to_json() if self.json == "-" else draw(report)
        is_shown = table.show(self.command, said)
        # The Markdown table already shows failures on a terminal, up to two lines each.
        are_shown = self.command == COMPARE and sys.stdout.isatty()
        for program in report.programs:
            if not program.comparable and not are_shown:
                different = f"{program.name}: {table.different(program)}"
                print(table.wrapped(f"gruyere {self.command}: {different}"), file=sys.stderr)
            for row in program.rows:
                if row.outcome != COMPLETED and not are_shown:
                    print(
                        f"gruyere {self.command}: {program.name}, {row.name}: {row.outcome}: "
                        f"{row.reason}",
                        file=sys.stderr,
                    )
        return report.code() or (0 if is_shown else _CODES[FAILED])

    def _compare(self, machine: Machine, servers: list[Server], folder: Path) -> Report:
        report = Report(
            {"device": machine.name, "stand_in": machine.is_stand_in, **servers[0].facts},
            {
                "steps": self.request["steps"],
                "runs": self.request["runs"],
                "fit": not self.request["no_fit"],
                "allocators": self.request["allocators"],
                "conf": self.request["conf"],
                "ranks": self.request.get("ranks"),
            },
        )
        programs = [Program(name, []) for name in self.request["program"]]
        programs += [Program(name, [], module=True) for name in self.request["module"]]
        for program in programs:
            if not program.built_in:
                program.arguments = self.request["arguments"]
            report.programs.append(program)
            for _ in self._measure(program, machine, servers, folder):
                # Write after each part, so that a later crash loses nothing.
                report.seconds = time.monotonic() - self.began
                if self.json not in (None, "-"):
                    _write(Path(self.json), report.to_json())
        return report

    def _measure(
        self, program: Program, machine: Machine, servers: list[Server], folder: Path
    ) -> Iterator[None]:
        """Fill in the program's rows."""

        def run(index: int, memory: Optional[int] = None) -> Result:
            what = "" if memory is None else f", on {table.size(memory)}"
            self._progress(f"{program.name}, {self.contenders[index].name}{what}")
            return self._run(program, machine, servers, index, folder, memory)

        # Runs alternate, so that other load on the machine affects all allocators alike.
        found: list[list[Result]] = [[] for _ in self.contenders]
        for number in range(self.request["runs"]):
            going = [
                index
                for index, results in enumerate(found)
                if not results or results[-1].outcome == COMPLETED
            ]
            if machine.is_stand_in and program.built_in:
                self._progress(f"{program.name}, step by step in turn")
                results = self._in_turn(
                    program, [servers[index] for index in going], 1 + number % 255
                )
            else:
                stored = self._compiled()
                results = [run(index) for index in going[:1]]
                if self._compiled() > stored and results[0].outcome != FAILED:
                    # All runs share the compiled kernels. Only this run had to compile them, and
                    # the compiler tries some on the device.
                    results = [run(going[0])]
                results += [run(index) for index in going[1:]]
            for index, result in zip(going, results):
                found[index].append(result)
        program.rows = [
            _row(contender, results) for contender, results in zip(self.contenders, found)
        ]
        program.left_out = sorted(
            {words for results in found for result in results for words in result.left_out}
        )
        program.differs = differences(
            [(table.called(row), results) for row, results in zip(program.rows, found)]
        )
        program.comparable = not program.differs
        program.peak_live = peak_live(program.rows) if program.comparable else None
        default = next(
            (results for row, results in zip(program.rows, found) if row.allocator == "default"),
            None,
        )
        for row, results in zip(program.rows, found):
            _relate(row, results, program, default)
        if program.comparable:
            self._ask_why(program, machine, servers, folder)
        yield
        live = program.peak_live
        # A search whose tries do different work finds nothing.
        if self.request["no_fit"] or live is None:
            return
        # On a real GPU torch's limit for cudaMallocAsync counts live bytes, not held ones, so it
        # does not bound memory.
        wanted = [
            index
            for index, row in enumerate(program.rows)
            if row.outcome == COMPLETED and (row.allocator != "async" or machine.is_stand_in)
        ]
        # All runs share a real GPU, but each process has its own stand-in.
        with ThreadPoolExecutor((os.cpu_count() or 1) if machine.is_stand_in else 1) as threads:
            try:
                jobs = [
                    threads.submit(
                        fit,
                        program.rows[index],
                        live,
                        lambda memory, index=index: run(index, memory),  # type: ignore[misc]
                    )
                    for index in wanted
                ]
                for job in jobs:
                    job.result()
                    yield
            except BaseException:
                # The executor waits for its threads.
                self._stop(servers)
                raise

    def _ask_why(
        self, program: Program, machine: Machine, servers: list[Server], folder: Path
    ) -> None:
        """If Gruyère holds more than another allocator of `gruyere compare`, run it again to find
        out which part of the memory held is the reason."""
        completed = [row for row in program.rows if row.outcome == COMPLETED]
        least = min(completed, key=lambda row: row.physical_peak, default=None)
        for index, row in enumerate(program.rows):
            if self.command == COMPARE and row in completed and row.allocator == "gruyere":
                if least is not None and row.physical_peak > least.physical_peak:
                    self._progress(f"{program.name}, {row.name}, again: why it holds more")
                    again = self._run(program, machine, servers, index, folder, None, parts=True)
                    # The parts of other work explain nothing.
                    once = Result(
                        row.outcome, "", row.steps, row.allocated_peak, row.requested_peak
                    )
                    if not differences([(row.name, [once, again])]):
                        row.parts = again.parts

    def _compiled(self) -> int:
        """The number of files that the user's programs have left in the caches of compiled code."""
        return 0 if self.box is None else self.box.compiled()

    def _stop(self, servers: list[Server]) -> None:
        """End all current runs, of all threads."""
        self.going.stop()
        for server in servers:
            server.process.kill()

    def _in_turn(self, program: Program, servers: list[Server], turn: int) -> list[Result]:
        """Run all servers at once, one step of each in turn, so that compared steps are measured
        within milliseconds. Only for the stand-in, since each process has its own."""
        for server in servers:
            server.begin(
                program.program, self._steps() or STEPS, None, self.request["timeout"], turn
            )
        going = list(servers)
        while going:
            going = [server for server in going if server.step()]
        return [server.end() for server in servers]

    def _progress(self, what: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{what}", end="", file=sys.stderr, flush=True)
        elif what:
            print(f"gruyere {self.command}: {what}", file=sys.stderr, flush=True)

    def _steps(self) -> Optional[int]:
        """The number of steps after which a program ends; None: a script runs to its end."""
        steps: Any = self.request["steps"] or STEPS
        return None if steps == ALL else int(steps)

    def _run(
        self,
        program: Program,
        machine: Machine,
        servers: list[Server],
        index: int,
        folder: Path,
        memory: Optional[int],
        parts: bool = False,
    ) -> Result:
        seconds = self.request["timeout"]
        steps = self._steps()
        if program.built_in:
            return servers[index].run(program.program, steps or STEPS, memory, seconds)
        assert self.box is not None
        if "failed" in servers[0].facts:
            return Result(FAILED, servers[0].facts["failed"])
        launch = Launch(
            None if program.module else program.program,
            program.program if program.module else None,
            program.arguments,
            self.request["python_options"],
            self.request.get("ranks"),
        )
        return run_launch(
            self.contenders[index], machine, self.box, self.going, launch, steps, memory, seconds,
            parts,
        )  # fmt: skip


def _row(contender: Contender, results: list[Result]) -> Row:
    """The row for the runs of one allocator: the worst outcome, the highest peaks, and the median
    of the runs' medians."""
    worst = max(results, key=lambda result: _CODES[result.outcome])
    row = Row(contender.allocator, contender.conf, worst.outcome, worst.reason)
    for name in (
        "steps",
        "allocated_peak",
        "requested_peak",
        "reserved_peak",
        "physical_peak",
        "beside_peak",
        "retries",
        "caught",
    ):
        setattr(row, name, max(getattr(result, name) for result in results))
    row.host_ns_of_runs = [
        median for result in results if (median := settled(result.host_ns)) is not None
    ]
    if row.outcome == COMPLETED and row.host_ns_of_runs:
        row.host_ns_a_step = statistics.median(row.host_ns_of_runs)
        steps = [median for result in results if (median := settled(result.step_ns)) is not None]
        row.step_ns = statistics.median(steps) if steps else None
    return row


def settled(times: list[int]) -> Optional[float]:
    """The median of the steps after the first ones."""
    return statistics.median(_after_first(times)) if times else None


def _after_first(times: list[int]) -> list[int]:
    return times[FIRST_STEPS:] or times


def peak_live(rows: list[Row]) -> int:
    """The program's peak of live bytes, with each block rounded up to 512 B: the least that an
    allocator counts. Gruyère and expandable segments count exactly that; torch's default adds
    remainders that it does not split off. cudaMallocAsync does not round."""
    counted = [
        row.allocated_peak for row in rows if row.outcome == COMPLETED and row.allocator != "async"
    ]
    return min(
        counted or [row.allocated_peak for row in rows if row.outcome == COMPLETED], default=0
    )


def _relate(
    row: Row, results: list[Result], program: Program, default: Optional[list[Result]]
) -> None:
    """Fill in the ratios to the program's peak and to torch's default (`default`: its runs). A row
    that is not comparable has only that to its own peak."""
    live = program.peak_live if program.comparable else row.allocated_peak
    if row.outcome != COMPLETED or not live:
        return
    row.hold_ratio = row.physical_peak / live
    if not program.comparable:
        return
    # The same step of the same round is the same work, measured at almost the same time.
    ratios = [
        ours / theirs
        for result, base in zip(results, default or [])
        if base.outcome == COMPLETED
        for ours, theirs in zip(_after_first(result.host_ns), _after_first(base.host_ns))
    ]
    row.host_ratio = statistics.median(ratios) if ratios else None


def fit(row: Row, live: int, attempt: Callable[[int], Result]) -> None:
    """Find the smallest device on which the program completes, by bisection between its peak of
    live bytes and the memory that it held with room to spare."""
    low, high = whole_pages(live) - PAGE, whole_pages(row.physical_peak)

    def completes(memory: int) -> bool:
        result = attempt(memory)
        completed = result.outcome == COMPLETED
        row.fit_tries.append({"bytes": memory, "outcome": result.outcome})
        if result.outcome in (FAILED, FAULTS):
            row.outcome, row.reason = (
                result.outcome,
                f"on a device of {table.size(memory)}: {result.reason}",
            )
        return completed

    while not completes(high):
        if row.outcome != COMPLETED or high > 4 * row.physical_peak:
            return
        low, high = high, whole_pages(int(high * 1.05) + PAGE)
    while high - low > max(PAGE, int(FIT * live)):
        middle = whole_pages((low + high) // 2)
        if middle >= high:
            break
        if completes(middle):
            high = middle
        else:
            low = middle
        if row.outcome != COMPLETED:
            return
    row.fit_bytes = high
    row.fit_ratio = high / live


def whole_pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def _check_writable(path: Path) -> None:
    """Raise GruyereError if --json is not writable, before any run."""
    try:
        with path.open("a"):
            pass
    except OSError as error:
        raise GruyereError(f"--json {path}: {error.strerror}") from error


def _write(path: Path, text: str) -> None:
    whole = path.with_name(path.name + ".part")
    whole.write_text(text)
    whole.replace(path)
