"""Runs: the program in its own process, under one allocator, on a stand-in of one size."""

from __future__ import annotations

import json
import os
import resource
import select
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Optional, Union

from .. import _job
from .._bench.machine import Machine
from .._bench.measure import COMPLETED, FAILED, FAULTS, OUT_OF_MEMORY
from .._bench.runners import Contender, Log, blame
from .._bench.server import ended
from .._sandbox import LOOKS, Box, Run, behind, remedy
from .worker import NOTHING, REFUSED, Found

# The memory of a device that is large enough for any program, to measure what it needs.
ROOM = 1 << 40
ZEROS, RANDOM = "zeros", "random:1"


def called(allocator: str) -> str:
    """The command's name for an allocator."""
    return "torch" if allocator == "default" else allocator


def named(word: str) -> str:
    """The allocator that the command calls `word`."""
    return "default" if word == "torch" else word


@dataclass(frozen=True)
class Plan:
    """A run to do."""

    allocator: str
    gpu: dict[str, Any]
    memory: int
    """Bytes of the stand-in in addition to the context."""
    arguments: tuple[str, ...]
    values: str = ZEROS
    """The values of device memory that was never written to."""
    analysed: bool = False
    more: int = 0
    """Steps beyond those asked."""
    again: bool = False
    """The same run once more."""
    rest: bool = False
    """Whether the run goes on after its steps (`rest`)."""


@dataclass
class Ran:
    """A finished run."""

    plan: Plan
    found: Found
    said: list[str] = field(default_factory=list)
    """The program's output."""
    host_reads: Optional[dict[str, int]] = None
    """Copies from the device to the host in the stand-in's books; None if it does not count
    them."""
    unknown: Optional[dict[str, int]] = None
    """Calls of NVIDIA libraries that need an unknown amount of memory, with the number of calls of
    each, from the stand-in's books."""
    others: int = 0
    """The number of other processes that used the device."""
    managed: int = 0
    """The most managed memory at a time, from the stand-in's books; it is the host's there."""

    @property
    def completed(self) -> bool:
        return self.found.outcome == COMPLETED

    @property
    def live_peak(self) -> int:
        """The peak of live memory: where requests were refused before the steps that count, and the
        run was analysed, of what came after them."""
        peak = (self.found.analysis or {}).get("peak") or {}
        return int(peak["bytes"]) if peak.get("refused") else self.found.allocated_peak

    @property
    def short(self) -> str:
        """Why the run counts for nothing although it completed; "" if it counts."""
        return str(self.found.facts.get("short", "")) if self.completed else ""

    @property
    def loop(self) -> Optional[dict[str, Any]]:
        """The loop in which the run is out of memory, and which invented values may end
        (`live`)."""
        if self.found.outcome != OUT_OF_MEMORY:
            return None
        return (self.found.analysis or {}).get("loop")

    @property
    def fits(self) -> bool:
        return self.completed and not self.short

    @property
    def failed(self) -> bool:
        """Whether the run has no figures: it neither completed nor ran out of memory."""
        return self.found.outcome in (FAILED, FAULTS, NOTHING)


@dataclass
class Rest:
    """The runs that went on after their steps."""

    whole: Optional[Ran] = None
    """The analysed one; None if nothing is known to follow the steps."""
    needs_more: bool = False
    """Whether it had more live after its steps than in them, or ran out of memory there."""
    rows: dict[tuple[str, str], Ran] = field(default_factory=dict)
    """If so: the runs by GPU and allocator."""
    is_unsure: bool = False
    """Whether one of them ran out of memory with zeros on the device and not with random values."""

    @property
    def growth(self) -> Optional[dict[str, Any]]:
        """What the batches of a DataLoader leave behind that was not run to its end, if any."""
        runs = [self.whole, *self.rows.values()] if self.whole is not None else []
        told = [(ran.found.facts.get("rest") or {}).get("growth") for ran in runs]
        return next(filter(None, told), None)

    def after(self, ran: Ran) -> Ran:
        """The run that went on where `ran` ended and shows more than it, or `ran`."""
        return self.rows.get((ran.plan.gpu["id"], ran.plan.allocator), ran)


class Stopped(Exception):
    """Runs were stopped."""


class Runner:
    def __init__(self, request: dict[str, Any], machine: Machine, folder: Path, box: Box) -> None:
        self.request = request
        self.machine = machine
        self.folder = folder
        self.box = box
        self.count = 0
        self.running = 0
        # Set once the program needed something that only one process can have.
        self.one_at_a_time = False
        self.turns = threading.Condition()
        self.going: set[Run] = set()
        self.stopped = False

    def stop(self) -> None:
        """End all current runs, of all threads, and start no more."""
        with self.turns:
            self.stopped = True
            for run in self.going:
                run.end()

    def run(self, plan: Plan, progress: Callable[[str], None]) -> Ran:
        """Do the run of `plan`; calls `progress` with the state of the run. If the program opens a
        port that a concurrent run has taken, it is run again, and from then on runs go one at a
        time."""
        ran, had_company = self._in_turn(plan, progress)
        text = "\n".join([ran.found.reason, *ran.said]).lower()
        if had_company and ran.found.outcome == FAILED and "address already in use" in text:
            with self.turns:
                self.one_at_a_time = True
            ran, _ = self._in_turn(plan, progress)
        return ran

    def _in_turn(self, plan: Plan, progress: Callable[[str], None]) -> tuple[Ran, bool]:
        """Do the run. Also returns whether other runs were active meanwhile."""
        with self.turns:
            self.turns.wait_for(lambda: self.running == 0 or not self.one_at_a_time)
            self.running += 1
            self.count += 1
            number, beside = self.count, self.running > 1
        try:
            ran = self._run(plan, progress, number)
        finally:
            with self.turns:
                self.running -= 1
                beside |= self.count > number
                self.turns.notify_all()
        return ran, beside

    def _run(self, plan: Plan, progress: Callable[[str], None], number: int) -> Ran:
        log = Log(self.folder)
        folder = self.box.new_folder()
        # A folder in which the program may write and that we read.
        own = folder / "own"
        contexts = own / "contexts"
        contexts.mkdir(parents=True)
        answer, books = own / "answer.json", own / "books"
        readable, writable = os.pipe()
        request = {
            "allocator": plan.allocator, "steps": self.request["steps"] + plan.more,
            "script": self.request.get("script"), "module": self.request.get("module"),
            "arguments": plan.arguments, "answer": str(answer), "progress": writable,
            "analysed": plan.analysed, "rest": plan.rest, "closed": self.box.closed,
            "ranks": self.request["ranks"],
        }  # fmt: skip
        environment = Contender(plan.allocator).environment(self.machine, of_users=True)
        environment.update(
            device(plan), PHANTOM_BOOKS=f"{books}.%p", PHANTOM_CONTEXTS=f"{contexts}/%p"
        )
        environment.update(_job.environment(self.request["ranks"]))
        # The stand-in's devices are the program's, which no setting of the caller may hide.
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        command = [
            sys.executable, *self.request["python_options"], "-m", "gruyere._dryrun", "worker",
            json.dumps(request),
        ]  # fmt: skip
        with self.turns:
            if self.stopped:
                raise Stopped
            run = self.box.start(command, environment, log.file, (writable,), folder)
            self.going.add(run)
        os.close(writable)
        try:
            ended_as = self._await(run, readable, progress)
        finally:
            os.close(readable)
            run.end()
            with self.turns:
                self.going.discard(run)
            said = log.close()
        try:
            if self.stopped:
                raise Stopped
            if isinstance(ended_as, Found):
                return Ran(plan, ended_as, said)
            return self._ran(plan, run, ended_as, answer, contexts, said)
        finally:
            run.close()

    def _ran(
        self, plan: Plan, run: Run, code: int, answer: Path, contexts: Path, said: list[str]
    ) -> Ran:
        """The result of a run that has ended with `code`."""
        # Empty if the figures could not be read: the log says why.
        told = answer.read_text() if answer.is_file() else ""
        found = Found(**json.loads(told)) if told else Found(FAILED)
        if not answer.is_file() and code >= 0:
            found.reason = (
                f"its process ended with {ended(code)} before it could be measured, for example "
                "by os._exit() or os.execv()"
            )
        elif not told or (code < 0 and found.outcome != FAILED):
            found.outcome, found.reason = FAILED, blame(ended(code), said)
        by_sandbox = run.refusals()
        if found.outcome == FAILED:
            why = behind("\n".join([found.reason, *said[-50:]]), by_sandbox)
            if why:
                found.outcome, found.reason = REFUSED, f"{found.reason}. {remedy(why[-1])}"
        found.refused = [*found.refused, *by_sandbox]
        others = sum(name != str(found.pid) for name in os.listdir(contexts))
        by_books = _read(run.own / f"books.{found.pid}")
        return Ran(
            plan, found, said, by_books.get("host_reads"), by_books.get("unknown_workspaces"),
            others, by_books.get("managed_peak", 0),
        )  # fmt: skip

    def _await(self, run: Run, readable: int, progress: Callable[[str], None]) -> Union[int, Found]:
        """Wait for the run. Returns its exit code, or the result if it had to be ended."""
        seconds = self.request["timeout"]
        deadline = time.monotonic() + seconds
        looked = time.monotonic()
        while time.monotonic() < deadline:
            ready, _, _ = select.select([readable], [], [], 0.1)
            text = os.read(readable, 4096) if ready else b""
            if text:
                progress(text.decode().splitlines()[-1])
            elif ready:
                # The program has ended, except for its exit handlers.
                try:
                    return run.process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    break
            elif run.process.poll() is not None:
                return run.process.returncode
            if time.monotonic() - looked > LOOKS:
                reason = self.box.too_much(run)
                if reason:
                    return Found(REFUSED, reason)
                looked = time.monotonic()
        return Found(FAILED, f"took more than {seconds} s; --timeout allows more")


def device(plan: Plan) -> dict[str, str]:
    """The stand-in's environment variables for a plan."""
    return {
        # The report says that there is no GPU; the program sees the requested GPU.
        "PHANTOM_DRYRUN": "1",
        "PHANTOM_DEVICES": "1",
        "PHANTOM_NAME": plan.gpu["name"],
        "PHANTOM_CAPABILITY": plan.gpu["capability"],
        "PHANTOM_MULTIPROCESSORS": str(plan.gpu["multiprocessors"]),
        # The program sees the GPU's total, with the context's share as used.
        "PHANTOM_MEMORY": str(plan.memory + plan.gpu["context"]),
        "PHANTOM_TAKEN": str(plan.gpu["context"]),
        "PHANTOM_VALUES": plan.values,
        # torch would otherwise cache kernels that the stand-in compiled to nothing.
        "USE_PYTORCH_KERNEL_CACHE": "0",
    }


def _read(books: Path) -> dict[str, Any]:
    """The stand-in's books; empty if it has written none."""
    try:
        told = json.loads(books.read_text())
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}


def at_once(asked: Optional[int]) -> int:
    """The number of concurrent runs that the host can take, estimated after a first run."""
    if asked:
        return asked
    cores = len(os.sched_getaffinity(0))
    used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10
    try:
        with open("/proc/meminfo") as file:
            facts = dict(line.split(":", 1) for line in file)
        available = int(facts["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return 1
    return max(1, min(cores, int(available / max(1.25 * used, 1))))
