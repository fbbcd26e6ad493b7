"""What callers use: a folder that goes away, the way that holds here, and runs in it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Optional

from .._errors import GruyereError
from . import landlock
from .enter import LANDLOCK, NONE, OVERLAY

# Bytes that a run may write unless the user says so, and bytes left free on the disk.
ROOM = 10 << 30
_LEFT_FREE = 1 << 30
# Seconds between two looks at a run's writes.
LOOKS = 1.0
# <linux/magic.h>: file systems that lie in memory.
_IN_MEMORY = {"tmpfs", "ramfs"}
# Characters that end a path for the loader of libraries, and for the options of a mount.
_SEPARATES = re.compile(r"[\s:;,$\\]")
# Caches of compiled code. Empty at first and shared by all runs, so that none depends on the user's
# earlier compilations.
_CACHES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "PYTORCH_KERNEL_CACHE_PATH": "torch",
}
# Reporters and hubs learn that there is no network, each in its own words.
_OFFLINE = {
    "WANDB_MODE": "offline",
    "COMET_START_ONLINE": "0",
    "NEPTUNE_MODE": "offline",
    "CLEARML_OFFLINE_MODE": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
}
# How long an attempt on a file of ours may take.
_PATIENCE = 30


@dataclass(frozen=True)
class Allowed:
    """What the user lets a program change."""

    everything: bool = False
    """No sandbox at all."""
    paths: tuple[str, ...] = ()
    network: bool = False


class Folder:
    """A folder of ours on a disk, gone with all that runs wrote at the end."""

    def __init__(self, name: str) -> None:
        tried = []
        for base in _bases():
            if _in_memory(base):
                tried.append(f"{base} (in memory)")
                continue
            try:
                self.path = Path(tempfile.mkdtemp(prefix=f"gruyere-{name}-", dir=base)).resolve()
                return
            except OSError as error:
                tried.append(f"{base} ({error.strerror})")
        raise GruyereError(
            "there is no folder on a disk for what the program writes; tried "
            f"{', '.join(tried)}: name one in TMPDIR"
        )

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        remove(self.path)


def _bases() -> list[str]:
    chosen = os.environ.get("TMPDIR", "")
    home = os.path.expanduser("~/.cache")
    found = [chosen, "/var/tmp", home, "/tmp"]
    return [
        base
        for base in dict.fromkeys(found)
        if base and os.path.isdir(base) and not _SEPARATES.search(base)
    ]


def _in_memory(path: str) -> bool:
    """By the mount that the path is below."""
    real, kind, longest = os.path.realpath(path), "", -1
    with open("/proc/self/mounts") as file:
        for line in file:
            _, point, found, *_ = line.split()
            point = point.encode().decode("unicode_escape")
            if (real == point or real.startswith(point.rstrip("/") + "/")) and len(
                point
            ) >= longest:
                kind, longest = found, len(point)
    return kind in _IN_MEMORY


def remove(path: Path) -> None:
    """Also folders that nobody may enter, as overlays leave them."""

    def again(call: Any, name: str, _: Any) -> None:
        try:
            os.chmod(os.path.dirname(name), 0o700)
            os.chmod(name, 0o700)
            if os.path.isdir(name) and not os.path.islink(name):
                shutil.rmtree(name, ignore_errors=True)
            else:
                os.unlink(name)
        except OSError:
            pass

    shutil.rmtree(path, onerror=again)


@dataclass(eq=False)
class Run:
    """A program in its sandbox."""

    folder: Path
    process: subprocess.Popen[bytes]

    @property
    def own(self) -> Path:
        """Where the program may write, and callers read."""
        return self.folder / "own"

    def refusals(self) -> list[dict[str, str]]:
        """What was refused: its kind ("write", "network", "space") and its name."""
        try:
            lines = (self.folder / "refusals").read_text().splitlines()
        except OSError:
            return []
        return [json.loads(line) for line in lines]

    def written(self) -> int:
        """Bytes on the disk that the run has taken."""
        total = 0
        for where, _, names in os.walk(self.folder):
            for name in names:
                try:
                    total += os.lstat(os.path.join(where, name)).st_blocks * 512
                except OSError:
                    continue
        return total

    def end(self) -> None:
        """Ends the program and all that it started, and waits for that."""
        if self.process.poll() is None:
            # The process between us and the program ends it, and waits for it (`enter`).
            self.process.terminate()
            try:
                self.process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                pass
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        self.process.wait()

    def close(self) -> None:
        """What it wrote goes away."""
        remove(self.folder)


@dataclass
class Box:
    """How programs are run here."""

    folder: Path
    way: str
    allowed: Allowed = field(default_factory=Allowed)
    room: int = ROOM

    def __post_init__(self) -> None:
        self.caches = self.folder / "caches"
        self.caches.mkdir(exist_ok=True)

    @property
    def closed(self) -> list[str]:
        """What programs can't change or reach."""
        if self.way == NONE:
            return []
        return ["files"] if self.allowed.network else ["files", "network"]

    def said(self) -> str:
        """What holds here, in a sentence."""
        if self.way == NONE:
            return "What the program writes stays (--allow-writes)."
        network = "the network is open" if self.allowed.network else "no network but loopback"
        how = {
            OVERLAY: "an overlay",
            LANDLOCK: "copies (Landlock)",
        }[self.way]
        kept = "".join(f"; what it writes in {path} stays" for path in self.allowed.paths)
        return f"The program can't harm your files: it writes to {how}; {network}{kept}."

    def has_compiled(self) -> bool:
        """Whether a run has left something in the shared caches."""
        return any(names for _, _, names in os.walk(self.caches))

    def too_much(self, run: Run) -> str:
        """Why a run may not go on writing; empty where it may."""
        free = shutil.disk_usage(self.folder).free
        if free < _LEFT_FREE:
            return (
                f"the disk of {self.folder} has {free >> 20} MiB left, and what the program "
                "writes goes there: free some, or name a folder on another disk in TMPDIR"
            )
        if run.written() > self.room:
            return (
                f"the program wrote more than {self.room >> 20} MiB, which is as much as it may "
                "write where all of it is thrown away: --scratch SIZE allows more"
            )
        return ""

    def wait(self, run: Run, seconds: float) -> tuple[Optional[int], str]:
        """Its exit code; None where it takes too long, or where it may not go on, for the reason
        given."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                return run.process.wait(min(LOOKS, max(0.0, deadline - time.monotonic()))), ""
            except subprocess.TimeoutExpired:
                reason = self.too_much(run)
                if reason:
                    return None, reason
        return None, ""

    def start(
        self,
        command: list[str],
        environment: dict[str, str],
        output: Optional[IO[bytes]],
        pass_fds: tuple[int, ...] = (),
        folder: Optional[Path] = None,
        cwd: Optional[str] = None,
    ) -> Run:
        """Starts it in a session of its own, with nothing to read. `output`: where it writes what
        it says (None: where we do). `folder`: an empty one for this run (default: a new one)."""
        if folder is None:
            folder = self.new_folder()
        cwd = cwd or os.getcwd()
        own, layers, mirror = (folder / name for name in ("own", "layers", "files"))
        for made in (own, layers, mirror):
            made.mkdir(exist_ok=True)
        homes = [home] if (home := os.environ.get("HOME", "")).startswith("/") else []
        request = {
            "way": self.way, "parent": os.getpid(), "command": command, "cwd": cwd,
            "homes": [home for home in homes if os.path.isdir(home)],
            "environment": self._environment(environment, own, str(mirror), cwd),
            "hidden": str(folder), "layers": str(layers), "mirror": str(mirror),
            "writable": [str(own), str(self.caches), *self.allowed.paths],
            "network": self.allowed.network, "refusals": str(folder / "refusals"),
            "room": self.room,
        }  # fmt: skip
        # The environment may hold more than an argument may, and secrets.
        written = folder / "request"
        written.touch(mode=0o600)
        written.write_text(json.dumps(request))
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _ENTER, str(_PACKAGES), str(written)],
            env={key: value for key, value in os.environ.items() if key != "LD_PRELOAD"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=pass_fds,
            start_new_session=True,
        )
        return Run(folder, process)

    def new_folder(self) -> Path:
        """A folder for a run."""
        return Path(tempfile.mkdtemp(prefix="run-", dir=self.folder))

    def _environment(
        self, given: dict[str, str], own: Path, mirror: str, cwd: str
    ) -> dict[str, str]:
        found = dict(given)
        if self.way == NONE:
            return found
        found.update({name: str(self.caches / what) for name, what in _CACHES.items()})
        if not self.allowed.network:
            for name, word in _OFFLINE.items():
                # A reporter that the user turned off stays off.
                if found.get(name) != "disabled":
                    found[name] = word
        tracking = own / "mlflow"
        if "://" in found.get("MLFLOW_TRACKING_URI", "") and not self.allowed.network:
            found["MLFLOW_TRACKING_URI"] = tracking.as_uri()
        records = own / "records"
        records.mkdir(exist_ok=True)
        found["GRUYERE_RECORD_DIR"] = str(records)
        # They go with the sandbox: nothing is kept for later.
        found["GRUYERE_SANDBOX"] = "1"
        if self.way == LANDLOCK:
            temporary = own / "tmp"
            temporary.mkdir(exist_ok=True)
            found.update(dict.fromkeys(("TMPDIR", "TMP", "TEMP"), str(temporary)))
            found["PWD"] = mirror + cwd
            if found.get("HOME", "").startswith("/"):
                found["HOME"] = mirror + found["HOME"]
            # Bytecode beside modules elsewhere could not be kept.
            found["PYTHONDONTWRITEBYTECODE"] = "1"
        return found


# The package's folder, and code that finds it there whatever the interpreter's options.
_PACKAGES = Path(__file__).resolve().parent.parent.parent
_ENTER = """
import sys
sys.path.insert(0, sys.argv[1])
from gruyere._sandbox.enter import main
main(sys.argv[2])
"""


# Messages of refused programs, by the kind of the refusal.
_WORDS = {
    "write": ("permission denied", "read-only file system", "operation not permitted",
              "cannot be opened", "can't open", "unable to open", "readonly database"),
    "space": ("no space left",),
    "network": ("unreachable", "name resolution", "name or service", "connect", "resolve"),
}  # fmt: skip


def behind(said: str, refused: list[dict[str, str]]) -> list[dict[str, str]]:
    """Of what was refused, that which may be why a program failed that said this."""
    lower = said.lower()
    return [
        one
        for one in refused
        if os.path.basename(one["name"]) in said
        or any(word in lower for word in _WORDS[one["kind"]])
    ]


def remedy(refused: dict[str, str]) -> str:
    """What was refused, and the option that allows it."""
    kind, name = refused["kind"], refused["name"]
    if kind == "network":
        return f"The network is closed to it, and it asked for {name}: --allow-network opens it"
    if kind == "space":
        return f"There was no room for a copy of {name}, which it writes to: --scratch SIZE"
    return (
        f"It may not write to {name}, which would stay: --allow-writes={name} lets it (or name a "
        "folder above that)"
    )


def choose(folder: Path, asked: dict[str, Any]) -> Box:
    """The first way that holds here. `asked`: the command's options
    (crates/cli/src/sandbox.rs).

    Raises GruyereError where none does.
    """
    paths = tuple(os.path.abspath(path) for path in asked["allow_writes"] if path)
    allowed = Allowed("" in asked["allow_writes"], paths, asked["allow_network"])
    room = asked["scratch"]
    for path in paths:
        if not os.path.exists(path):
            raise GruyereError(f"--allow-writes={path}: no such file or folder; make it first")
    if allowed.everything:
        return Box(folder, NONE, allowed, room)
    reasons = []
    for way, why_not in ((OVERLAY, ""), (LANDLOCK, landlock.why_not())):
        # Without the user's allowances: our own folder may lie in them.
        why_not = why_not or _try(Box(folder, way, Allowed(network=allowed.network), room))
        if not why_not:
            return Box(folder, way, allowed, room)
        reasons.append(f"{way}: {why_not}")
    raise GruyereError(
        "the program would overwrite its files: no sandbox can be made here "
        f"({'; '.join(reasons)}). Use a kernel with Landlock (5.13 or newer) or a container that "
        "allows user namespaces; or copy your folder, and run it there with --allow-writes"
    )


# The attempt: reads, writes and removes a file, makes a new one; reaches nothing.
_ATTEMPT = """
import errno, os, socket, sys
assert open("kept").read() == "before", "a file can't be read"
with open("kept", "r+") as file:
    file.write("after!")
assert open("kept").read() == "after!", "a file can't be written to"
os.remove("gone")
os.mkdir("folder/new")
if sys.argv[1] == "closed":
    try:
        socket.create_connection(("192.0.2.1", 9), 1)
        sys.exit("the network is open")
    except OSError as error:
        if error.errno != errno.ENETUNREACH:
            sys.exit("the network is open")
"""


def _try(box: Box) -> str:
    """Why it does not hold; empty where it does."""
    folder = box.new_folder()
    files = Path(tempfile.mkdtemp(prefix="attempt-", dir=box.folder))
    try:
        for name in ("kept", "gone"):
            (files / name).write_text("before")
        (files / "folder").mkdir()
        network = "open" if box.allowed.network else "closed"
        with tempfile.TemporaryFile() as output:
            run = box.start(
                [sys.executable, "-I", "-S", "-c", _ATTEMPT, network], dict(os.environ), output,
                folder=folder, cwd=str(files),
            )  # fmt: skip
            try:
                code = run.process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                return "it hangs"
            finally:
                run.end()
            output.seek(0)
            said = output.read().decode(errors="replace").strip().splitlines()
        kept = all((files / name).is_file() for name in ("kept", "gone"))
        if not kept or (files / "kept").read_text() != "before" or os.listdir(files / "folder"):
            return "what is written there arrives here"
        if code:
            reason = said[-1] if said else f"exit code {code}"
            return reason.removeprefix("the sandbox could not be made: ")
        return ""
    finally:
        remove(folder)
        remove(files)
