"""Which run comes when; what they come to."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Callable, NoReturn, Optional

from .. import _launch
from .._bench.compare import Row, fit
from .._bench.machine import choose
from .._bench.measure import FAILED, OUT_OF_MEMORY
from .._errors import GruyereError
from .._sandbox import Folder
from .._sandbox import choose as sandbox
from . import history, page, report, text
from .runs import RANDOM, ROOM, ZEROS, Plan, Ran, Runner, at_once, called
from .sweep import Sweep
from .worker import NOTHING, REFUSED, UNUSABLE

WRONG_ARGUMENTS = 2
Gpu = dict[str, Any]


def main(request: str) -> None:
    asked = json.loads(request)
    began, began_nanoseconds = time.monotonic(), time.time_ns()
    for number in (signal.SIGTERM, signal.SIGHUP):
        # A signal that nohup made the process ignore stays ignored.
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _end)
    # Without its bars the answer is as good.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        _check(asked)
        with Folder("dryrun") as folder:
            machine = choose(True, asked["beside"], folder)
            box = sandbox(folder, asked["sandbox"])
            print(f"gruyere dryrun: {box.said()}", file=sys.stderr, flush=True)
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
    found["run"] = {
        "name": asked["name"], "pid": os.getpid(), "host": socket.gethostname(),
        "started_nanoseconds": began_nanoseconds, "gruyere": asked["gruyere"],
    }  # fmt: skip
    all_written = _write(asked, found)
    sys.exit(found["verdict"]["exit"] if all_written else WRONG_ARGUMENTS)


def _end(number: int, _frame: Any) -> NoReturn:
    """A signal asks for the end: programs that run end too, and our files go."""
    sys.exit(128 + number)


class Unusable(Exception):
    """torch cannot do it; the text says what can."""


class Broken(Exception):
    """The program failed."""

    def __init__(self, ran: Ran) -> None:
        super().__init__(ran.found.reason)
        self.ran = ran


def _check(asked: dict[str, Any]) -> None:
    """What is wrong with the request, before anything runs. Raises GruyereError."""
    if asked["module"] is not None:
        _launch._check_module(asked["module"])
    elif not Path(asked["script"]).exists():
        raise GruyereError(f"{asked['script']}: no such file; name the script as python would run")
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
                # A failed program gives no answer, and no file.
                os.unlink(name)
    if asked["history"] is not None:
        try:
            history.prepare(asked["history"])
        except OSError as error:
            raise GruyereError(f"--history {asked['history']}: {error.strerror}") from error


def _write(asked: dict[str, Any], found: dict[str, Any]) -> bool:
    """Prints the answer, and writes it where that was asked for; whether all of it was written."""
    whole = json.dumps(found, indent=1) + "\n"
    try:
        print(whole if asked["json"] == "-" else text.draw(found), end="", flush=True)
    except BrokenPipeError:
        # The reader has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    writings: dict[str, Callable[[str], object]] = {
        "json": lambda name: Path(name).write_text(whole, "utf-8"),
        "html": lambda name: Path(name).write_text(page.draw(found), "utf-8"),
        "history": lambda name: history.keep(name, found["run"], whole),
    }
    all_written = True
    for option, write in writings.items():
        name = asked[option]
        if name is None or (option, name) == ("json", "-"):
            continue
        try:
            write(name)
        except OSError as error:
            print(f"gruyere dryrun: --{option} {name}: {error.strerror}", file=sys.stderr)
            all_written = False
    return all_written


def _show(ran: Ran) -> None:
    """What the program said before it failed: its own traceback, where it has one."""
    if ran.found.outcome == NOTHING:
        print(f"gruyere dryrun: {ran.found.reason}", file=sys.stderr)
        return
    said = ran.said
    starts = [number for number, line in enumerate(said) if line.startswith("Traceback (most")]
    for line in said[starts[0] :] if starts else said[-20:]:
        print(line, file=sys.stderr)
    print(
        f"gruyere dryrun: the program failed under {called(ran.plan.allocator)} on "
        f"{ran.plan.gpu['id']}: {ran.found.reason}",
        file=sys.stderr,
    )


class Progress:
    """One line on a terminal, one a run elsewhere."""

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
        self.allocators: list[str] = list(dict.fromkeys(asked["allocators"]))
        self.known: dict[tuple[Any, ...], Ran] = {}
        self.jobs = 1

    def all(self) -> dict[str, Any]:
        """Every run, and the report. Raises Broken where the program fails."""
        arguments = tuple(self.asked["arguments"])
        sweep = None
        if self.asked["sweep"] is not None:
            sweep = Sweep(self.asked["sweep"], arguments)
            arguments = self.sweep(sweep)
        first, second = self.analysed(arguments)
        pairs = [(gpu, allocator) for gpu in self.gpus for allocator in self.allocators]
        plain = self.together((self.plain(*pair, arguments) for pair in pairs), may_fail=True)
        # The need of a program that did not get it.
        short = [ran for ran in plain if ran.found.outcome == OUT_OF_MEMORY]
        room = self.together(
            (self.plain(ran.plan.gpu, ran.plan.allocator, arguments, ROOM) for ran in short),
            may_fail=True,
        )
        # If it fails with room too, the row does not lack memory.
        lame = {id(ran): with_room for ran, with_room in zip(short, room) if with_room.failed}
        plain = self.standing([lame.get(id(ran), ran) for ran in plain])
        with_room = {(ran.plan.gpu["id"], ran.plan.allocator): ran for ran in room}
        smallest = (
            self.smallest([ran for ran in (*plain, *room) if ran.completed])
            if self.asked["smallest"]
            else {}
        )
        return report.made(
            self.asked, arguments, first, second, plain, with_room, smallest,
            sweep.table() if sweep else None,
        )  # fmt: skip

    def standing(self, rows: list[Ran]) -> list[Ran]:
        """The rows. One that failed leaves the others standing, and its program's words are shown.
        Raises Broken where all failed."""
        if all(ran.failed for ran in rows):
            raise Broken(rows[0])
        for ran in rows:
            if ran.failed:
                _show(ran)
        return rows

    def usable(self, gpu: Gpu) -> int:
        """What the GPU has for allocators."""
        return report.usable(gpu)

    def plain(
        self, gpu: Gpu, allocator: str, arguments: tuple[str, ...], memory: Optional[int] = None
    ) -> Plan:
        return Plan(allocator, gpu, memory or self.usable(gpu), arguments)

    def analysed(self, arguments: tuple[str, ...]) -> tuple[Ran, Ran]:
        """The two runs that are looked at: on the first GPU, or with room to spare where it is too
        small."""
        gpu = self.gpus[0]

        def plan(memory: int, values: str) -> Plan:
            return Plan("default", gpu, memory, arguments, values, analysed=True)

        memory = self.usable(gpu)
        first = self.run(plan(memory, ZEROS))
        if self.runner.box.has_compiled():
            # All runs share the compiled kernels. This one found none of them, all others do.
            self.known.clear()
            first = self.run(plan(memory, ZEROS))
        if first.found.outcome == OUT_OF_MEMORY:
            memory = ROOM
            first = self.run(plan(memory, ZEROS))
        if first.found.outcome == OUT_OF_MEMORY:
            raise Broken(first)
        self.jobs = at_once(self.asked["jobs"])
        # Other values may well make it fail; the report says so.
        second = self.run(plan(memory, RANDOM), may_fail=True)
        return first, second

    def sweep(self, sweep: Sweep) -> tuple[str, ...]:
        """Runs every value; the arguments of the one that the rest is told of."""
        pairs = [(gpu, allocator) for gpu in self.gpus for allocator in self.allocators]

        def ran(gpu: Gpu, allocator: str, value: str) -> Ran:
            return self.run(self.plain(gpu, allocator, sweep.arguments(value)))

        def search(pair: tuple[Gpu, str]) -> None:
            sweep.search(*pair, partial(ran, *pair))

        # One run shows how much host memory a run takes.
        ran(*pairs[0], sweep.first())
        self.jobs = at_once(self.asked["jobs"])
        with self.threads() as threads:
            list(threads.map(search, pairs))
        return sweep.arguments(sweep.chosen(self.gpus[0]["id"]))

    def smallest(self, done: list[Ran]) -> dict[tuple[str, str], int]:
        """The smallest device for each, by bisection, each try really run."""

        def search(ran: Ran) -> Row:
            row = Row(ran.plan.allocator, "", physical_peak=ran.found.physical_peak)

            def attempt(memory: int) -> Any:
                plan = self.plain(ran.plan.gpu, ran.plan.allocator, ran.plan.arguments, memory)
                found = self.run(plan, may_fail=True).found
                if found.outcome == FAILED:
                    # Short of memory, a program may end with an error of its own.
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

    def together(self, plans: Iterable[Plan], may_fail: bool = False) -> list[Ran]:
        with self.threads() as threads:
            return list(threads.map(partial(self.run, may_fail=may_fail), plans))

    @contextmanager
    def threads(self) -> Iterator[ThreadPoolExecutor]:
        """Runs beside each other. An error, or the user, ends them all."""
        with ThreadPoolExecutor(self.jobs) as threads:
            try:
                yield threads
            except BaseException:
                self.runner.stop()
                raise

    def run(self, plan: Plan, may_fail: bool = False) -> Ran:
        """Runs it, once. Raises Unusable and Broken."""
        key = (
            plan.allocator, plan.gpu["id"], plan.memory, plan.arguments, plan.values, plan.analysed
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
        if ran.found.outcome == UNUSABLE:
            raise Unusable(ran.found.reason)
        if ran.found.outcome == REFUSED or (ran.failed and not may_fail):
            raise Broken(ran)
        return ran
