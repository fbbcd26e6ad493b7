"""The dry run's main process: the order of the runs, and the answer."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Callable, Optional

from .. import _launch
from .._bench.compare import Row, fit
from .._bench.machine import choose
from .._bench.measure import FAILED, OUT_OF_MEMORY
from .._bench.table import show, wrapped
from .._errors import GruyereError
from .._sandbox import Folder, exit_on_signals
from .._sandbox import choose as sandbox
from . import gpus, history, page, report, text
from .gpus import Gpu
from .runs import RANDOM, ROOM, ZEROS, Plan, Ran, Rest, Runner, at_once, called, named
from .sizing import asks
from .sweep import Sweep
from .trust import begins, parted
from .worker import NOTHING, REFUSED, UNUSABLE

NOT_PRINTED = 1
WRONG_ARGUMENTS = 2
# The further steps of a run that shows whether memory that two steps left behind stays.
MORE = 2


def main(request: str) -> None:
    asked = json.loads(request)
    if gpus.LIST in asked["gpu"]:
        if not show("dryrun", gpus.table()):
            sys.exit(NOT_PRINTED)
        return
    began, began_nanoseconds = time.monotonic(), time.time_ns()
    exit_on_signals()
    # A terminal that cannot show the bars still gets the rest of the answer.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        _read(asked)
        with Folder("dryrun") as folder:
            machine = choose(True, asked["beside"], folder)
            box = sandbox(folder, asked["sandbox"])
            print(wrapped(f"gruyere dryrun: {box.said()}"), file=sys.stderr, flush=True)
            runner = Runner(asked, machine, folder, box)
            found = DryRun(asked, runner).all()
            found["sandbox"] = {"way": box.way, "said": box.said(), "runs": runner.count}
    except (GruyereError, Unusable) as error:
        print(f"gruyere dryrun: {error}", file=sys.stderr)
        sys.exit(WRONG_ARGUMENTS)
    except Broken as error:
        _show(error.ran)
        sys.exit(report.UNTRUSTED if error.ran.found.outcome == REFUSED else 1)
    except KeyboardInterrupt:
        sys.exit(130)
    found["seconds"] = round(time.monotonic() - began, 1)
    found["run"] = report.identity(asked, began_nanoseconds)
    sys.exit(_write(asked, found) or found["verdict"]["exit"])


class Unusable(Exception):
    """The dry run is not possible with this torch or environment; the message says what to do."""


class Broken(Exception):
    """The program failed."""

    def __init__(self, ran: Ran) -> None:
        super().__init__(ran.found.reason)
        self.ran = ran


def _read(asked: dict[str, Any]) -> None:
    """Check the request before anything runs, and replace what was typed by what it names. Raises
    GruyereError."""
    asked["gpus"] = gpus.chosen(asked["gpu"], asked["gb"], asked["context"])
    asked["others"] = gpus.others(asked["gpu"], asked["gb"])
    asked["allocators"] = list(dict.fromkeys(map(named, asked["alloc"])))
    if asked["sweep"] is not None:
        asked["sweep"] = Sweep(asked["sweep"], tuple(asked["arguments"]))
    asked["name"] = asked["name"] or asked["run_name"]
    if "module" in asked:
        _launch._check_module(asked["module"])
    else:
        _launch._check_script(asked["script"])
    for option in ("json", "html"):
        name = asked[option]
        if name not in (None, "-"):
            is_new = not Path(name).exists()
            try:
                with open(name, "a"):
                    pass
            except OSError as error:
                raise GruyereError(f"--{option} {name}: {error.strerror}") from error
            if is_new:
                # If the program fails, there is no answer and must be no file.
                os.unlink(name)
    if asked["history"] is not None:
        try:
            history.prepare(asked["history"])
        except OSError as error:
            raise GruyereError(f"--history {asked['history']}: {error.strerror}") from error


def _write(asked: dict[str, Any], found: dict[str, Any]) -> int:
    """Print the answer and write the requested files: all that can be, since an answer takes
    minutes. Returns the exit code if something was not written, else 0."""
    whole = json.dumps(found, indent=1) + "\n"
    is_printed = show("dryrun", whole if asked["json"] == "-" else text.draw(found))
    code = 0 if is_printed else NOT_PRINTED
    writings: dict[str, Callable[[str], object]] = {
        "json": lambda name: Path(name).write_text(whole, "utf-8"),
        "html": lambda name: Path(name).write_text(page.draw(found), "utf-8"),
        "history": lambda name: history.keep(name, found["run"], whole),
    }
    for option, write in writings.items():
        name = asked[option]
        if name is None or (option, name) == ("json", "-"):
            continue
        try:
            write(name)
        except OSError as error:
            print(f"gruyere dryrun: --{option} {name}: {error.strerror}", file=sys.stderr)
            code = WRONG_ARGUMENTS
    return code


def _show(ran: Ran) -> None:
    """Print the output of a failed program: its own traceback, if there is one."""
    if ran.found.outcome == NOTHING:
        print(f"gruyere dryrun: {ran.found.reason}", file=sys.stderr)
        return
    said = ran.said
    starts = [number for number, line in enumerate(said) if line.startswith("Traceback (most")]
    where = f"under {called(ran.plan.allocator)} on {ran.plan.gpu['id']}"
    if ran.plan.analysed:
        where = f"while it was analysed, {where}"
    for line in said[starts[0] :] if starts else said[-20:]:
        print(line, file=sys.stderr)
    print(
        f"gruyere dryrun: the program failed {where}: {ran.found.reason}",
        file=sys.stderr,
    )


class Progress:
    """The progress display: one line that is updated on a terminal, one line per run elsewhere."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.on_terminal = sys.stderr.isatty()
        self.going: dict[int, str] = {}
        self.begun = 0

    def begin(self, what: str) -> int:
        with self.lock:
            self.begun += 1
            self.going[self.begun] = what
            if self.on_terminal:
                self._draw()
            else:
                print(f"gruyere dryrun: {what}", file=sys.stderr, flush=True)
            return self.begun

    def heard(self, number: int, what: str) -> None:
        with self.lock:
            self.going[number] = f"{self.going[number].partition(': ')[0]}: {what}"
            if self.on_terminal:
                self._draw()

    def end(self, number: int) -> None:
        with self.lock:
            del self.going[number]
            if self.on_terminal:
                self._draw()

    def _draw(self) -> None:
        line = "; ".join(self.going.values())
        width = max(20, os.get_terminal_size(sys.stderr.fileno()).columns - 1)
        print(f"\r\033[K{line[:width]}", end="", file=sys.stderr, flush=True)


class DryRun:
    def __init__(self, asked: dict[str, Any], runner: Runner) -> None:
        self.asked = asked
        self.runner = runner
        self.progress = Progress()
        self.gpus: list[Gpu] = asked["gpus"]
        self.allocators: list[str] = asked["allocators"]
        self.known: dict[tuple[Any, ...], Ran] = {}
        self.jobs = 1
        # Whether the program requests other amounts on a device with room; None: not known.
        self.scales: Optional[bool] = None
        # Whether it requests other amounts in each run, whatever the values on the device.
        self.by_host = False

    def all(self) -> dict[str, Any]:
        """Do all runs and make the report. Raises Broken if the program fails."""
        arguments = tuple(self.asked["arguments"])
        sweep: Optional[Sweep] = self.asked["sweep"]
        if sweep is not None:
            arguments = self.sweep(sweep)
        first, second = self.analysed(arguments)
        pairs = [(gpu, allocator) for gpu in self.gpus for allocator in self.allocators]
        plain = self.together((self.plain(*pair, arguments) for pair in pairs), may_fail=True)
        # Measure with room to spare what the programs need that ran out of memory.
        short = [
            ran for ran in plain if ran.found.outcome == OUT_OF_MEMORY and self.may_have_room(ran)
        ]
        room = self.together(
            (self.plain(ran.plan.gpu, ran.plan.allocator, arguments, ROOM) for ran in short),
            may_fail=True,
        )
        # A program that fails even with room to spare does not fail for lack of memory.
        lame = {id(ran): with_room for ran, with_room in zip(short, room) if with_room.failed}
        plain = self.standing([lame.get(id(ran), ran) for ran in plain])
        rest = self.rest(first, plain)
        # The same for those that ran out of memory after their steps.
        short = [
            ran
            for ran in rest.rows.values()
            if ran.found.outcome == OUT_OF_MEMORY and self.may_have_room(ran)
        ]
        gone_on = self.together((replace(ran.plan, memory=ROOM) for ran in short), is_soft=True)
        room += [ran for ran in gone_on if ran.completed]
        with_room = {(ran.plan.gpu["id"], ran.plan.allocator): ran for ran in room}
        smallest = (
            self.smallest([ran for ran in (*map(rest.after, plain), *room) if ran.fits])
            if self.asked["smallest"]
            else {}
        )
        return report.made(
            self.asked, arguments, first, second, plain, with_room, smallest,
            sweep.table() if sweep else None, self.by_host, rest,
        )  # fmt: skip

    def rest(self, first: Ran, plain: list[Ran]) -> Rest:
        """The runs that go on after the steps of those that fit."""
        fitting = [ran for ran in plain if ran.fits]
        has_rest = first.fits and first.found.facts.get("has_rest") and fitting
        # One that ended before its steps were made has no more.
        has_rest = has_rest and first.found.steps >= self.asked["steps"]
        # What the program does at its end, with invented weights, must not stay.
        if not (has_rest and self.runner.box.keeps_all_in):
            return Rest()
        whole = self.run(replace(first.plan, rest=True), is_soft=True)
        is_out = whole.found.outcome == OUT_OF_MEMORY and whole.loop is None
        is_more = (
            whole.live_peak > first.live_peak
            or whole.found.caught > first.found.caught
        )
        rest = Rest(whole, is_out or (whole.completed and is_more))
        if rest.needs_more:
            gone_on = self.together((replace(ran.plan, rest=True) for ran in fitting), is_soft=True)
            # Other values on the device must lead to an out-of-memory too.
            out = [ran for ran in gone_on if ran.found.outcome == OUT_OF_MEMORY]
            # Analysed where that is possible: only then are the floats not next to zero.
            other = (
                replace(ran.plan, values=RANDOM, analysed=ran.plan.allocator == "default")
                for ran in out
            )
            again = self.together(other, is_soft=True)
            sure = [ran for ran, same in zip(out, again) if same.found.outcome == OUT_OF_MEMORY]
            rest.is_unsure = len(sure) < len(out)
            rest.rows = {
                (ran.plan.gpu["id"], ran.plan.allocator): ran
                for ran in gone_on
                if ran.completed or ran in sure
            }
        return rest

    def may_have_room(self, ran: Ran) -> bool:
        """Whether a run on a device with room shows what the program needs: not if it would then
        size itself by that device."""
        return not self.scales and (self.scales is False or not asks(ran.found.facts))

    def standing(self, rows: list[Ran]) -> list[Ran]:
        """The rows, after printing the output of those that failed. Raises Broken if all failed;
        otherwise the other rows remain valid."""
        if all(ran.failed for ran in rows):
            raise Broken(rows[0])
        for ran in rows:
            if ran.failed:
                _show(ran)
        return rows

    def usable(self, gpu: Gpu) -> int:
        """The GPU's memory that is available to allocators."""
        return report.usable(gpu)

    def plain(
        self, gpu: Gpu, allocator: str, arguments: tuple[str, ...], memory: Optional[int] = None
    ) -> Plan:
        return Plan(allocator, gpu, memory or self.usable(gpu), arguments)

    def analysed(self, arguments: tuple[str, ...]) -> tuple[Ran, Ran]:
        """The two analysed runs: on the first GPU, or with room to spare if that is too small."""
        gpu = self.gpus[0]

        def plan(memory: int, values: str, more: int = 0, again: bool = False) -> Plan:
            return Plan("default", gpu, memory, arguments, values, True, more, again)

        memory = self.usable(gpu)
        first = self.run(plan(memory, ZEROS))
        if self.runner.box.compiled():
            # All runs share the compiled kernels. Only this run had to compile them, so repeat it.
            self.known.clear()
            first = self.run(plan(memory, ZEROS))
        if first.found.outcome == OUT_OF_MEMORY:
            with_room = self.run(plan(ROOM, ZEROS), may_fail=True)
            if with_room.failed and self.may_have_room(first):
                raise Broken(with_room)
            self.scales = with_room.failed or not begins(first.found, with_room.found)
            if with_room.completed and not self.scales:
                memory, first = ROOM, with_room
        self.jobs = at_once(self.asked["jobs"])
        # Other values may make the program fail; the report says so.
        second = self.run(plan(memory, RANDOM), may_fail=True)
        ours, theirs = first.found.analysis, second.found.analysis
        if ours and theirs and parted(ours, theirs):
            # The values are not to blame if the requests differ also with the same values.
            third = self.run(plan(memory, ZEROS, again=True), may_fail=True).found.analysis
            self.by_host = bool(third and parted(ours, third))
        growth = ours and ours["growth"]
        if ours and growth and growth.pop("unsure"):
            longer = self.run(plan(memory, ZEROS, MORE), may_fail=True).found.analysis
            ours["growth"] = longer and longer["growth"]
            if ours["growth"]:
                ours["growth"].pop("unsure")
        return first, second

    def sweep(self, sweep: Sweep) -> tuple[str, ...]:
        """Run every value. Returns the arguments with the value that the rest of the answer is
        about."""
        pairs = [(gpu, allocator) for gpu in self.gpus for allocator in self.allocators]

        def ran(gpu: Gpu, allocator: str, value: str) -> Ran:
            return self.run(self.plain(gpu, allocator, sweep.arguments(value)))

        def search(pair: tuple[Gpu, str]) -> None:
            sweep.search(*pair, partial(ran, *pair))

        # The first run shows how much host memory a run takes.
        ran(*pairs[0], sweep.first())
        self.jobs = at_once(self.asked["jobs"])
        with self.threads() as threads:
            list(threads.map(search, pairs))
        return sweep.arguments(sweep.chosen(self.gpus[0]["id"]))

    def smallest(self, done: list[Ran]) -> dict[tuple[str, str], int]:
        """The smallest device for each run, by bisection; each try is a real run."""

        def search(ran: Ran) -> Row:
            row = Row(ran.plan.allocator, "", physical_peak=ran.found.physical_peak)

            def attempt(memory: int) -> Any:
                plan = replace(ran.plan, memory=memory)
                tried = self.run(plan, may_fail=True)
                found = tried.found
                if found.outcome == FAILED or tried.short:
                    # A program that is short of memory may end with an error of its own.
                    found.outcome = OUT_OF_MEMORY
                return found

            fit(row, ran.found.allocated_peak, attempt)
            return row

        with self.threads() as threads:
            rows = list(threads.map(search, done))
        return {
            (ran.plan.gpu["id"], ran.plan.allocator): row.fit_bytes
            for ran, row in zip(done, rows)
            if row.fit_bytes is not None
        }

    def together(
        self, plans: Iterable[Plan], may_fail: bool = False, is_soft: bool = False
    ) -> list[Ran]:
        with self.threads() as threads:
            return list(threads.map(partial(self.run, may_fail=may_fail, is_soft=is_soft), plans))

    @contextmanager
    def threads(self) -> Iterator[ThreadPoolExecutor]:
        """A pool of threads for concurrent runs. An error or an interrupt ends all of them."""
        with ThreadPoolExecutor(self.jobs) as threads:
            try:
                yield threads
            except BaseException:
                self.runner.stop()
                raise

    def run(self, plan: Plan, may_fail: bool = False, is_soft: bool = False) -> Ran:
        """Do the run of a plan, or return its earlier result. Raises Unusable and Broken, unless
        it `is_soft`: then the answer can do without it."""
        key = (
            plan.allocator, plan.gpu["id"], plan.memory, plan.arguments, plan.values, plan.analysed,
            plan.more, plan.again, plan.rest,
        )  # fmt: skip
        if key not in self.known:
            number = self.progress.begin(text.of_plan(plan, self.usable(plan.gpu)))
            try:
                self.known[key] = self.runner.run(
                    plan, lambda what: self.progress.heard(number, what)
                )
            finally:
                self.progress.end(number)
        ran = self.known[key]
        if is_soft:
            return ran
        if ran.found.outcome == UNUSABLE:
            raise Unusable(ran.found.reason)
        if ran.found.outcome == REFUSED or (ran.failed and not may_fail):
            raise Broken(ran)
        return ran
