"""A run: the program in a process of its own, under one allocator, on a stand-in of one size."""

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
from typing import Any, Callable, Optional

from .._bench.machine import Machine
from .._bench.measure import COMPLETED, FAILED, FAULTS
from .._bench.runners import Contender, Log, blame, end_session
from .._bench.server import ended
from .worker import NOTHING, Found

# A device on which nothing is short, to tell what a program would take.
ROOM = 1 << 40
ZEROS, RANDOM = "zeros", "random:1"


def called(allocator: str) -> str:
    """An allocator as the command calls it."""
    return "torch" if allocator == "default" else allocator


@dataclass(frozen=True)
class Plan:
    """What is to run."""

    allocator: str
    gpu: dict[str, Any]
    memory: int
    """Bytes that the stand-in has beside the context."""
    arguments: tuple[str, ...]
    values: str = ZEROS
    """What reads of the device see that nobody has written to."""
    analysed: bool = False


@dataclass
class Ran:
    """What came of it."""

    plan: Plan
    found: Found
    said: list[str] = field(default_factory=list)
    """What the program printed."""
    host_reads: Optional[dict[str, int]] = None
    """Copies from the device to the host, by the stand-in's books, where it counts them."""
    unknown: Optional[dict[str, int]] = None
    """Calls of NVIDIA's libraries that want memory nobody knows the size of, and how often each was
    made, by the stand-in's books."""
    others: int = 0
    """Processes beside the program's own that used the device."""

    @property
    def completed(self) -> bool:
        return self.found.outcome == COMPLETED

    @property
    def failed(self) -> bool:
        """It has no figures: neither did it come through, nor was memory short."""
        return self.found.outcome in (FAILED, FAULTS, NOTHING)


class Stopped(Exception):
    """No run is wanted any more."""


class Runner:
    def __init__(self, request: dict[str, Any], machine: Machine, folder: Path) -> None:
        self.request = request
        self.machine = machine
        self.folder = folder
        self.count = 0
        self.running = 0
        # Said once the program has been seen to want something that one process can have.
        self.one_at_a_time = False
        self.turns = threading.Condition()
        self.going: set[subprocess.Popen[bytes]] = set()
        self.stopped = False

    def stop(self) -> None:
        """Ends all runs that are under way, in whichever thread, and lets none begin."""
        with self.turns:
            self.stopped = True
            for process in self.going:
                end_session(process)

    def run(self, plan: Plan, progress: Callable[[str], None]) -> Ran:
        """Runs it to its end; `progress` hears how far it is. A program that opens a port of its
        own finds it taken by the run beside it: it is run again, and from then on one at a time."""
        ran, had_company = self._in_turn(plan, progress)
        text = "\n".join([ran.found.reason, *ran.said]).lower()
        if had_company and ran.found.outcome == FAILED and "address already in use" in text:
            with self.turns:
                self.one_at_a_time = True
            ran, _ = self._in_turn(plan, progress)
        return ran

    def _in_turn(self, plan: Plan, progress: Callable[[str], None]) -> tuple[Ran, bool]:
        """Runs it, and whether others ran meanwhile."""
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
        answer, books = (self.folder / f"{what}-{number}.json" for what in ("answer", "books"))
        contexts = self.folder / f"contexts-{number}"
        contexts.mkdir()
        readable, writable = os.pipe()
        request = {
            "allocator": plan.allocator, "steps": self.request["steps"],
            "script": self.request["script"], "module": self.request["module"],
            "arguments": plan.arguments, "answer": str(answer), "progress": writable,
            "analysed": plan.analysed, "parent": os.getpid(),
        }  # fmt: skip
        environment = Contender(plan.allocator).environment(self.machine, of_users=True)
        environment.update(
            device(plan), PHANTOM_BOOKS=f"{books}.%p", PHANTOM_CONTEXTS=f"{contexts}/%p"
        )
        # The stand-in has one device, and no other has a say.
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        with self.turns:
            if self.stopped:
                raise Stopped
            process = subprocess.Popen(
                [
                    sys.executable,
                    *self.request["python_options"],
                    "-m",
                    "gruyere._dryrun",
                    "worker",
                    json.dumps(request),
                ],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log.file,
                stderr=log.file,
                pass_fds=[writable],
                # Its children are to end with it.
                start_new_session=True,
            )
            self.going.add(process)
        os.close(writable)
        try:
            code = self._await(process, readable, progress)
        finally:
            os.close(readable)
            end_session(process)
            with self.turns:
                self.going.discard(process)
            said = log.close()
        if self.stopped:
            raise Stopped
        if code is None:
            seconds = self.request["timeout"]
            found = Found(FAILED, f"took more than {seconds} s; --timeout allows more")
            return Ran(plan, found, said)
        # Empty, where the reading of the numbers failed: the log says why.
        told = answer.read_text() if answer.is_file() else ""
        found = Found(**json.loads(told)) if told else Found(FAILED)
        if not answer.is_file() and code >= 0:
            found.reason = (
                f"its process ended with {ended(code)} before it could be measured, as by "
                "os._exit() or os.execv()"
            )
        elif not told or (code < 0 and found.outcome != FAILED):
            found.outcome, found.reason = FAILED, blame(ended(code), said)
        others = sum(name != str(process.pid) for name in os.listdir(contexts))
        by_books = _read(Path(f"{books}.{process.pid}"))
        return Ran(
            plan, found, said, by_books.get("host_reads"), by_books.get("unknown_workspaces"),
            others,
        )  # fmt: skip

    def _await(
        self, process: subprocess.Popen[bytes], readable: int, progress: Callable[[str], None]
    ) -> Optional[int]:
        """Its exit code; None where it took too long."""
        deadline = time.monotonic() + self.request["timeout"]
        while time.monotonic() < deadline:
            ready, _, _ = select.select([readable], [], [], 0.1)
            text = os.read(readable, 4096) if ready else b""
            if text:
                progress(text.decode().splitlines()[-1])
            elif ready:
                # The program has ended, but for what runs at its exit.
                try:
                    return process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    return None
            elif process.poll() is not None:
                return process.returncode
        return None


def device(plan: Plan) -> dict[str, str]:
    """The stand-in's variables for a plan."""
    return {
        "PHANTOM_DEVICES": "1",
        "PHANTOM_NAME": plan.gpu["name"],
        "PHANTOM_CAPABILITY": plan.gpu["capability"],
        "PHANTOM_MULTIPROCESSORS": str(plan.gpu["multiprocessors"]),
        # A program that asks is told the GPU's total, and of it the context's part as not free.
        "PHANTOM_MEMORY": str(plan.memory + plan.gpu["context"]),
        "PHANTOM_TAKEN": str(plan.gpu["context"]),
        "PHANTOM_VALUES": plan.values,
        # torch would keep kernels that were compiled to nothing.
        "USE_PYTORCH_KERNEL_CACHE": "0",
    }


def _read(books: Path) -> dict[str, Any]:
    """The stand-in's books; empty where it has written none."""
    try:
        told = json.loads(books.read_text())
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}


def at_once(asked: Optional[int]) -> int:
    """How many runs the host bears beside each other, once one has ended."""
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
