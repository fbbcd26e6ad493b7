"""Runs of a program under one allocator: by a server for built-in programs, in separate processes
for the user's programs."""

from __future__ import annotations

import json
import os
import re
import select
import socket
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from .. import _job
from .._sandbox import Box, Run, behind, remedy
from .machine import Machine
from .measure import FAILED, GONE, Result
from .server import ended

# torch's settings for each of its own allocators.
TORCH_CONF = {
    "default": "",
    "expandable": "expandable_segments:True",
    "async": "backend:cudaMallocAsync",
    "gruyere": "",
}
# Newer versions of torch read the first of these, older ones only the second.
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# Settings of the caller that would give a row another allocator than its name says.
_FOREIGN = (*VARIABLES, "PYTORCH_NO_CUDA_MEMORY_CACHING", "GRUYERE_ENABLE", "GRUYERE_CONF")


# The number of bytes at the end of a program's output that are searched.
_SAID = 1 << 20


class Contender:
    """A row of the table: an allocator and, for Gruyère, its configuration."""

    def __init__(self, allocator: str, conf: str = "") -> None:
        self.allocator = allocator
        self.conf = conf
        self.name = f"{allocator} {conf}".strip()

    def environment(self, machine: Machine, of_users: bool) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if key not in _FOREIGN}
        kept.update(machine.environment)
        if TORCH_CONF[self.allocator]:
            kept.update(dict.fromkeys(VARIABLES, TORCH_CONF[self.allocator]))
        if self.allocator == "gruyere":
            kept["GRUYERE_CONF"] = self.conf
            if of_users:
                kept["GRUYERE_ENABLE"] = "1"
        return kept


class Server:
    """A process that has imported torch and forks for each run."""

    def __init__(self, contender: Contender, machine: Machine, folder: Path) -> None:
        self.log = Log(folder)
        self.turns, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "gruyere._bench",
                    "server",
                    json.dumps({"allocator": contender.allocator, "turns": theirs.fileno()}),
                ],
                env=contender.environment(machine, of_users=False),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.log.file,
                pass_fds=[theirs.fileno()],
                text=True,
            )
        self.turn = 0
        # Read when the first run needs it, so that the servers start in parallel.
        self._facts: Optional[dict[str, Any]] = None

    @property
    def facts(self) -> dict[str, Any]:
        """Facts about the server: "torch" and the like, or "failed" with the reason."""
        if self._facts is None:
            self._facts = self._read()
        return self._facts

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        return {"failed": self.log.blame(ended(self.process.wait()))}

    def run(self, program: str, steps: int, memory: Optional[int], seconds: float) -> Result:
        """Do a run from beginning to end."""
        self.begin(program, steps, memory, seconds)
        return self.end()

    def begin(
        self, program: str, steps: int, memory: Optional[int], seconds: float, turn: int = 0
    ) -> None:
        """Begin a run. If `turn` is not 0 but this run's number from 1 to 255, its steps wait for
        `step`."""
        self.turn = turn
        if "failed" in self.facts:
            return
        self.log.mark()
        request = {
            "program": program,
            "steps": steps,
            "memory": memory,
            "seconds": seconds,
            "turn": turn,
        }
        assert self.process.stdin
        try:
            print(json.dumps(request), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            self._facts = {"failed": self.log.blame("its process is gone")}

    def step(self) -> bool:
        """Let a run that goes in turn do its next step. Returns False if it has ended."""
        if "failed" in self.facts:
            return False
        assert self.process.stdout
        self.turns.send(bytes([self.turn]))
        either: list[Any] = [self.turns, self.process.stdout]
        ready, _, _ = select.select(either, [], [])
        return self.turns in ready and bool(self.turns.recv(1))

    def end(self) -> Result:
        """Wait for the current run and return its result."""
        answer = self.facts if "failed" in self.facts else self._read()
        if "failed" in answer:
            self._facts = answer
            return Result(FAILED, answer["failed"])
        result = Result(**answer)
        if result.outcome == FAILED and result.reason.startswith(("killed", "exit code")):
            result.reason = self.log.blame(result.reason)
        return result

    def close(self) -> None:
        self.turns.close()
        if self.process.stdin:
            try:
                self.process.stdin.close()
            except BrokenPipeError:
                pass
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass(frozen=True)
class Launch:
    """A user's program, as given to python."""

    script: Optional[str]
    module: Optional[str]
    arguments: list[str]
    python_options: list[str]
    ranks: Optional[int] = None
    """Run as the first of so many ranks, without the others."""


class Going:
    """The runs that go on, so that they can be ended from outside."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.runs: set[Run] = set()
        self.is_stopped = False

    def start(self, box: Box, *arguments: Any, **options: Any) -> Run:
        """Start a run (`Box.start`). Raises Stopped if runs were stopped."""
        with self.lock:
            if self.is_stopped:
                raise Stopped
            run = box.start(*arguments, **options)
            self.runs.add(run)
            return run

    def over(self, run: Run) -> None:
        with self.lock:
            self.runs.discard(run)

    def stop(self) -> None:
        """End the runs, and start no more."""
        with self.lock:
            self.is_stopped = True
            for run in self.runs:
                run.end()


class Stopped(Exception):
    """Runs were stopped."""


def run_launch(
    contender: Contender,
    machine: Machine,
    box: Box,
    going: Going,
    launch: Launch,
    steps: Optional[int],
    memory: Optional[int],
    seconds: float,
    parts: bool = False,
) -> Result:
    """Run a user's program in its own process, in the current folder as it is now. What the program
    writes is discarded, so that each run sees the same files. `parts`: measure what Gruyère holds
    beyond live memory instead of times."""
    folder = box.new_folder()
    own = folder / "own"
    own.mkdir()
    log = Log(folder)
    answer = own / "answer.json"
    request = {
        "allocator": contender.allocator, "memory": memory, "steps": steps,
        "script": launch.script, "module": launch.module, "arguments": launch.arguments,
        "answer": str(answer), "closed": box.closed, "parts": parts, "ranks": launch.ranks,
    }  # fmt: skip
    command = [
        sys.executable, *launch.python_options, "-m", "gruyere._bench", "script",
        json.dumps(request),
    ]  # fmt: skip
    environment = contender.environment(machine, of_users=True)
    environment.update(_job.environment(launch.ranks))
    run = going.start(box, command, environment, log.file, folder=folder)
    try:
        code, reason = box.wait(run, seconds)
        run.end()
        result = Result(**json.loads(answer.read_text())) if answer.is_file() else None
        if code is None:
            return Result(
                FAILED,
                reason
                or f"took more than {seconds:.0f} s; --timeout allows more, --steps ends it sooner",
            )
        if result is None and code == 0:
            return Result(FAILED, GONE)
        if result is None or (code < 0 and result.outcome != FAILED):
            result = Result(FAILED, log.blame(ended(code)))
        why = behind("\n".join([result.reason, *log.said()[-50:]]), run.refusals())
        if result.outcome == FAILED and why:
            result.reason = f"{result.reason}. {remedy(why[-1])}"
        return result
    finally:
        run.end()
        going.over(run)
        log.file.close()
        run.close()


class Log:
    """The output of a process, kept in case it fails."""

    def __init__(self, folder: Path) -> None:
        handle, name = tempfile.mkstemp(dir=folder, suffix=".log")
        self.file = os.fdopen(handle, "wb")
        self.path = Path(name)
        self.from_byte = 0

    def mark(self) -> None:
        """Mark the current end: later output belongs to the next run."""
        self.from_byte = self.path.stat().st_size

    def said(self) -> list[str]:
        """The lines since the mark; only the last ones if there are many."""
        with self.path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(self.from_byte, end - _SAID))
            return file.read().decode(errors="replace").splitlines()

    def close(self) -> list[str]:
        """Return the same lines and remove the file."""
        said = self.said()
        self.file.close()
        self.path.unlink()
        return said

    def blame(self, how: str) -> str:
        """`how` the process ended, with the part of its output that says why."""
        return blame(how, self.said())


# The beginning of a warning: Python's (its source line follows), and torch's own.
_WARNING = re.compile(r"\S.*:\d+: \w*Warning: |(\[rank\d+\]:)?\[W\d{4} |\w*Warning: ")
# Messages of a process that dies: from faulthandler, C++, the dynamic loader, and Rust.
_DYING = re.compile(
    r"Fatal Python error: |terminate called |  what\(\): |.*: symbol lookup error: |"
    r".*: error while loading shared libraries: |thread '.*' panicked at "
)
_TRACEBACK = "Traceback (most recent call last):"


def blame(how: str, said: list[str]) -> str:
    """`how` a process ended, with the lines of its output that say why: the message of a dying
    process, else the end of its last traceback, else its last line. Warnings are skipped."""
    lines = _without_warnings(said)
    why = _dying(lines)
    if why is None and not how.startswith("killed"):
        why = _raised(lines)
    if why is None and lines:
        why = lines[-1].strip()
    return f"{how}: {why}" if why else f"{how}, without any output"


def _without_warnings(said: list[str]) -> list[str]:
    lines: list[str] = []
    is_of_warning = False
    for line in said:
        is_of_warning = bool(_WARNING.match(line)) or (is_of_warning and line.startswith(" "))
        if line.strip() and not is_of_warning:
            lines.append(line)
    return lines


def _dying(lines: list[str]) -> Optional[str]:
    """The last message of a dying process, with the place in the program."""
    said = [index for index, line in enumerate(lines) if _DYING.match(line)]
    if not said:
        return None
    first = last = said[-1]
    while first - 1 in said:
        first -= 1
    words = lines[first : last + 1]
    rest = iter(lines[last + 1 :])
    if any(line.startswith("Current thread ") for line in rest):
        words += [line for line in rest if line.startswith("  File ")][:1]
    return ", ".join(word.strip() for word in words)


def _raised(lines: list[str]) -> Optional[str]:
    """The error at the end of the last traceback."""
    starts = [index for index, line in enumerate(lines) if line.startswith(_TRACEBACK)]
    if not starts:
        return None
    return next((line for line in lines[starts[-1] + 1 :] if not line.startswith(" ")), None)
