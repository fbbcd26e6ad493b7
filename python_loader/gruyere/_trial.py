"""`python -m gruyere --stand-in train.py`: runs some steps of a program under Gruyère on the
stand-in GPU, on a machine without a real one.

The program runs in the sandbox of dry runs, so what it writes is discarded; what Gruyère writes
(its record, dumps, histories, traces) is kept, for `gruyere top` and others. Inside the sandbox the
same command runs again, with VARIABLE in its environment, so that the program sees the command line
that the user typed.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NoReturn, Optional

from . import _stand_in
from ._dryrun.answers import Answers
from ._errors import GruyereError, say
from ._files import replacing
from ._imports import when_imported
from ._native import conf
from ._ranks import place
from ._steps import _Leader
from ._trial_records import Records

# The number of steps that the process in the sandbox runs.
VARIABLE = "GRUYERE_STAND_IN_STEPS"
# The default number of steps, as in `gruyere compare`.
STEPS = 12
ALL = "all"
# Variables of the caller that would hide the stand-in from the program.
_HIDING = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
# The default sandbox of `gruyere dryrun` (crates/cli/src/sandbox.rs).
_SANDBOX: dict[str, Any] = {"allow_writes": [], "allow_network": False, "scratch": 10 << 30}


def steps(text: str) -> Optional[int]:
    """The number of steps in `text`, or None for all steps. Raises GruyereError if it is
    neither."""
    if text == ALL:
        return None
    if text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    raise GruyereError(f"--steps {text}: expected a number of steps, or {ALL}")


def begin(asked: Optional[int], what: str, is_stdin: bool) -> None:
    """In the user's process: run the command in the sandbox and exit as it does. In the sandbox:
    return, after arranging for the program to end after its steps. `is_stdin`: the program is on
    standard input, which is empty otherwise."""
    given = os.environ.pop(VARIABLE, None)
    if given is None:
        _check_no_rank(what)
        _run(asked, what, is_stdin)
    limit = steps(given)
    if limit is not None:
        _Count(limit)
    # The stand-in invents what the program reads from the device.
    Answers().watch()


def _check_no_rank(what: str) -> None:
    """Raises GruyereError in a rank that a launcher has started: each would have a sandbox and a
    network of its own, and wait for the others for ever."""
    rank, _, ranks = place()
    if rank is not None and ranks is not None and ranks > 1:
        raise GruyereError(
            f"--stand-in: this is one of {ranks} ranks, and each would be alone in a sandbox of "
            "its own; start the launcher in one, with a device for each rank, and let them use "
            f"gloo, since NCCL has one rank only here: PHANTOM_DEVICES={ranks} python -m gruyere "
            f"--stand-in --steps all -m torch.distributed.run --nproc-per-node {ranks} {what}"
        )


def _run(asked: Optional[int], what: str, is_stdin: bool) -> NoReturn:
    from ._bench.machine import check_alone, choose
    from ._sandbox import Folder, exit_on_signals
    from ._sandbox import choose as sandbox

    exit_on_signals()
    check_alone()
    _stand_in.check_torch()
    try:
        with Folder("stand-in") as folder, _Outputs(folder) as outputs:
            machine = choose(True, None, folder)
            try:
                box = sandbox(folder, {**_SANDBOX, "allow_writes": outputs.folders})
            except GruyereError as error:
                raise GruyereError(
                    f"--stand-in: {error} (an option of `gruyere compare --stand-in`)"
                ) from error
            # A program may make fewer, or have no optimiser.
            far = f"up to {asked} steps" if asked is not None else "all steps"
            say(f"gruyere: {far} of {what} on a stand-in GPU; nothing computed or saved")
            environment = _environment(asked, machine.environment, outputs)
            with ExitStack() as during:
                program = during.enter_context(_program(folder)) if is_stdin else None
                shown = _records()
                records = during.enter_context(Records(shown)) if shown is not None else None
                run = box.start(_command(), environment, None, records=records, stdin=program)
                try:
                    code, why = box.wait(run, float("inf"))
                finally:
                    run.end()
                refused = run.refusals()
    except KeyboardInterrupt:
        sys.exit(130)
    if code is None:
        raise GruyereError(f"--stand-in: {why.partition(': --scratch')[0]}")
    if code != 0 and refused:
        named = ", ".join(dict.fromkeys(one["name"] for one in refused[-3:]))
        say(
            f"gruyere: --stand-in: the sandbox denied the program access to {named}; `gruyere "
            "compare --stand-in` has options that allow it"
        )
    sys.exit(128 - code if code < 0 else code)


def _records() -> Optional[str]:
    """The folder in which `gruyere top` and `post` look for records; None if it is of no use."""
    folder = os.environ.get("GRUYERE_RECORD_DIR") or "/dev/shm"
    # The library takes no relative one.
    is_usable = os.path.isabs(folder) and os.path.isdir(folder) and os.access(folder, os.W_OK)
    return folder if is_usable else None


def _folders(settings: str) -> dict[str, str]:
    """The folders in `settings`, by key."""
    asked = conf.entries(settings)
    named = {key: asked.get(key, "") for key in ("dump_dir", "history")}
    return {key: folder for key, folder in named.items() if folder not in ("", "none")}


class _Outputs:
    """What Gruyère is to write for the user: into folders, and a trace. Makes the folders that are
    missing, as the library would outside of the sandbox, and removes them at the end if nothing was
    written. A trace has a folder of ours, and is moved to its place at the end: the folder that it
    is for may be the program's, whose files are discarded."""

    def __init__(self, ours: Path) -> None:
        self.made: list[str] = []
        self.settings = os.environ.get(conf.VARIABLE, "")
        self.traces = ours / "traces"
        trace = conf.entries(self.settings).get("trace", "none")
        self.trace = os.path.abspath(trace) if trace not in ("", "none") else None

    @property
    def folders(self) -> list[str]:
        """Where Gruyère may write."""
        ours = [str(self.traces)] if self.trace is not None else []
        return [*_folders(self.settings).values(), *ours]

    def named(self) -> dict[str, str]:
        """The settings that name them, as they are in the sandbox."""
        # Not relative: in a sandbox of links the working folder is another.
        found = {key: os.path.abspath(folder) for key, folder in _folders(self.settings).items()}
        if self.trace is not None:
            found["trace"] = str(self.traces / os.path.basename(self.trace))
        # A value cannot contain a comma.
        return {key: value for key, value in found.items() if "," not in value}

    def __enter__(self) -> _Outputs:
        """Raises GruyereError if one cannot be made."""
        if self.trace is not None:
            _check_trace(self.trace)
            self.traces.mkdir()
        for key, folder in _folders(self.settings).items():
            try:
                self._make(os.path.abspath(folder))
            except OSError as error:
                self._remove()
                raise GruyereError(
                    f"--stand-in: {key}:{folder}: the folder cannot be made ({error.filename}: "
                    f"{error.strerror}); name one where you may write"
                ) from error
        return self

    def __exit__(self, *_: object) -> None:
        if self.trace is not None:
            for file in sorted(self.traces.iterdir()):
                _place(file, os.path.join(os.path.dirname(self.trace), file.name))
        self._remove()

    def _make(self, folder: str) -> None:
        missing = []
        while not os.path.isdir(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        for path in reversed(missing):
            # With the rights that the umask leaves, as the library makes it.
            with suppress(FileExistsError):
                os.mkdir(path)
                self.made.append(path)
            if not os.path.isdir(path):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)

    def _remove(self) -> None:
        for path in reversed(self.made):
            with suppress(OSError):
                os.rmdir(path)


def _check_trace(path: str) -> None:
    """Raises GruyereError if no trace can be written to `path`: at the end it would be too late."""
    folder = os.path.dirname(path)
    why = ""
    if "%" in folder:
        why = "%p and %r can only be in the file's name here"
    elif not os.path.isdir(folder):
        why = f"there is no folder {folder}; make it first"
    elif not os.access(folder, os.W_OK):
        why = f"you may not write in {folder}; name a file where you may"
    if why:
        raise GruyereError(f"--stand-in: trace:{path}: {why}")


def _place(file: Path, to: str) -> None:
    """Move a trace to its place, over a regular file at most, as the library writes it."""
    try:
        if os.path.lexists(to) and (os.path.islink(to) or not os.path.isfile(to)):
            raise FileExistsError(errno.EEXIST, "not a regular file")
        # The two may be on different disks.
        with file.open("rb") as written, replacing(Path(to), f"{file.name}.") as part:
            shutil.copyfileobj(written, part)
            os.fchmod(part.fileno(), os.fstat(written.fileno()).st_mode & 0o7777)
    except OSError as error:
        say(f"gruyere: --stand-in: the trace was not kept: {to}: {error.strerror}")


def _program(folder: Path) -> IO[bytes]:
    """The program on standard input, in a file of ours: the sandbox gets no file of the user's that
    is open."""
    file = folder / "program"
    file.write_bytes(sys.stdin.buffer.read())
    return file.open("rb")


def _command() -> list[str]:
    """This command again, with the options of the interpreter."""
    typed: Optional[list[str]] = getattr(sys, "orig_argv", None)
    if typed is not None:
        return [sys.executable, *typed[1:]]
    # Python 3.9 has no orig_argv; this is how multiprocessing starts an interpreter like its own.
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, "-m", "gruyere", *sys.argv[1:]]


def _environment(
    asked: Optional[int], machine: dict[str, str], outputs: _Outputs
) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key not in _HIDING}
    # In the place of the user's, so that `gruyere stat` shows each once. The summary is the result
    # of a trial.
    settings = {"summary": "on", **conf.entries(outputs.settings), **outputs.named()}
    kept[conf.VARIABLE] = ",".join(f"{key}:{value}" for key, value in settings.items())
    # DRYRUN silences the stand-in's own line: this command has printed one.
    kept |= {**machine, _stand_in.DRYRUN: "1", VARIABLE: ALL if asked is None else str(asked)}
    # What the stand-in compiles must not stay in torch's cache of kernels.
    kept["USE_PYTORCH_KERNEL_CACHE"] = "0"
    return kept


class _Count:
    """Ends the program after a number of steps of its optimiser."""

    def __init__(self, limit: int) -> None:
        # Requests trainers to stop if they support it; other programs end as by sys.exit().
        from ._dryrun.stops import Stops

        self.limit = limit
        self.done = 0
        self.pid = os.getpid()
        self.leader = _Leader()
        self.stops = Stops()
        self.stops.watch()
        when_imported("torch", self._imported)

    def _imported(self, torch: ModuleType) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        if os.getpid() != self.pid or not self.leader.stepped(optimizer):
            return
        self.done += 1
        if self.done >= self.limit:
            self.stops.reached(self.done, self.limit)
