"""The sandbox's interface: a temporary folder, the choice of the way, and runs."""

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
from . import landlock, owned
from .enter import LANDLOCK, NONE, OVERLAY
from .folders import remove
from .mounts import mounts

# Bytes that a run may write by default, and bytes that must stay free on the disk.
ROOM = 10 << 30
_LEFT_FREE = 1 << 30
# Seconds between two checks of the bytes that a run has written.
LOOKS = 1.0
# <linux/magic.h>: file systems in memory.
_IN_MEMORY = {"tmpfs", "ramfs"}
# Characters that end a path for the dynamic loader or in the options of a mount.
_SEPARATES = re.compile(r"[\s:;,$\\]")
# Caches of compiled code. They are empty at first and shared by all runs, so that no run depends on
# the user's earlier compilations.
_CACHES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "PYTORCH_KERNEL_CACHE_PATH": "torch",
}
# Variables that tell experiment trackers and model hubs that there is no network.
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
# The time limit for a test of the sandbox, and for a program to end (seconds).
_PATIENCE = 30
# Of a sandbox that was tried: it does not work, or the machine has no time for it.
_NO_ANSWER = f"no answer in {_PATIENCE} s"


@dataclass(frozen=True)
class Allowed:
    """What the user allows a program to change or reach."""

    everything: bool = False
    """No sandbox at all."""
    paths: tuple[str, ...] = ()
    network: bool = False


class Folder:
    """A folder on a disk, removed at the end with everything that runs wrote."""

    def __init__(self, name: str) -> None:
        # A run that was killed could not remove its own.
        owned.sweep(_bases())
        tried = []
        for base in _bases():
            if _in_memory(base):
                tried.append(f"{base} (in memory)")
                continue
            try:
                self.path = Path(tempfile.mkdtemp(prefix=f"gruyere-{name}-", dir=base)).resolve()
            except OSError as error:
                tried.append(f"{base} ({error.strerror})")
                continue
            owned.own(self.path)
            return
        raise GruyereError(
            "there is no folder on a disk for the files that the program writes; tried "
            f"{', '.join(tried)}: set TMPDIR to one"
        )

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        owned.release(self.path)


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
    """Whether the path is on a file system in memory, according to its mount."""
    real, kind, longest = os.path.realpath(path), "", -1
    for mount in mounts():
        point = mount.path
        # Of several at one point, the last one is on top.
        if (real == point or real.startswith(point.rstrip("/") + "/")) and len(point) >= longest:
            kind, longest = mount.kind, len(point)
    return kind in _IN_MEMORY


@dataclass(eq=False)
class Run:
    """A program in its sandbox."""

    folder: Path
    process: subprocess.Popen[bytes]

    @property
    def own(self) -> Path:
        """The folder in which the program may write and that callers read."""
        return self.folder / "own"

    def refusals(self) -> list[dict[str, str]]:
        """The refusals: for each its kind ("write", "network", "socket", "space") and
        name."""
        try:
            lines = (self.folder / "refusals").read_text().splitlines()
        except OSError:
            return []
        return [json.loads(line) for line in lines]

    def written(self) -> int:
        """Bytes that the run has written to the disk."""
        total = 0
        for where, _, names in os.walk(self.folder):
            for name in names:
                try:
                    total += os.lstat(os.path.join(where, name)).st_blocks * 512
                except OSError:
                    continue
        return total

    def end(self) -> None:
        """End the program and all its processes, and wait for them."""
        if self.process.poll() is None:
            # The process between us and the program (`enter`) ends it and waits for it.
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
        """Remove what the run wrote."""
        remove(self.folder)


@dataclass
class Box:
    """The sandbox in the way that was chosen."""

    folder: Path
    way: str
    allowed: Allowed = field(default_factory=Allowed)
    room: int = ROOM

    def __post_init__(self) -> None:
        self.caches = self.folder / "caches"
        self.caches.mkdir(exist_ok=True)

    @property
    def closed(self) -> list[str]:
        """What programs cannot change or reach."""
        if self.way == NONE:
            return []
        return ["files"] if self.allowed.network else ["files", "network"]

    @property
    def keeps_all_in(self) -> bool:
        """Whether nothing that a program writes stays, and it reaches no network."""
        return self.way != NONE and self.allowed == Allowed()

    def said(self) -> str:
        """The sandbox's guarantees, in a sentence."""
        if self.way == NONE:
            return "What the program writes stays (--allow-writes)."
        network = "the network is open" if self.allowed.network else "no network but loopback"
        how = {
            OVERLAY: "an overlay",
            LANDLOCK: "copies (Landlock)",
        }[self.way]
        kept = "".join(f"; what it writes in {path} stays" for path in self.allowed.paths)
        return f"The program cannot change your files: it writes to {how}; {network}{kept}."

    def compiled(self) -> int:
        """The number of files that runs have left in the shared caches."""
        return sum(len(names) for _, _, names in os.walk(self.caches))

    def too_much(self, run: Run) -> str:
        """Why a run must stop writing; empty if it may go on."""
        free = shutil.disk_usage(self.folder).free
        if free < _LEFT_FREE:
            return (
                f"the disk of {self.folder}, on which the program's files are written, has "
                f"{free >> 20} MiB left: free some space, or set TMPDIR to a folder on another disk"
            )
        if run.written() > self.room:
            return (
                f"the program wrote more than {self.room >> 20} MiB, the limit for files that are "
                "discarded: --scratch SIZE allows more"
            )
        return ""

    def wait(self, run: Run, seconds: float) -> tuple[Optional[int], str]:
        """Wait for the run. Returns its exit code and no reason; or None if it takes too long, or
        None and the reason why it must stop."""
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
        records: Optional[str] = None,
        stdin: Optional[IO[bytes]] = None,
    ) -> Run:
        """Start the command in its own session. `output`: the file for its output (None: ours).
        `folder`: an empty folder for this run (default: a new one). `records`: the folder of
        Gruyère's records, if they are to be seen and kept. `stdin`: its stdin (None: empty)."""
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
            "environment": self._environment(environment, own, str(mirror), cwd, records),
            "hidden": str(folder), "shown": str(self.folder), "layers": str(layers),
            "mirror": str(mirror),
            "writable": [
                str(own), str(self.caches), *([records] if records else []), *self.allowed.paths
            ],
            "network": self.allowed.network, "refusals": str(folder / "refusals"),
            "room": self.room,
        }  # fmt: skip
        # Not as an argument: the environment may be too long for one, and may contain secrets.
        locks = owned.locks(self.folder)
        request["locks"] = locks
        written = folder / "request"
        written.touch(mode=0o600)
        written.write_text(json.dumps(request))
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _ENTER, str(_PACKAGES), str(written)],
            env={key: value for key, value in os.environ.items() if key != "LD_PRELOAD"},
            stdin=subprocess.DEVNULL if stdin is None else stdin,
            stdout=output,
            stderr=output,
            pass_fds=(*pass_fds, *locks),
            start_new_session=True,
        )
        return Run(folder, process)

    def new_folder(self) -> Path:
        """Make a folder for a run."""
        return Path(tempfile.mkdtemp(prefix="run-", dir=self.folder))

    def _environment(
        self, given: dict[str, str], own: Path, mirror: str, cwd: str, records: Optional[str]
    ) -> dict[str, str]:
        found = dict(given)
        if self.way == NONE:
            return found
        found.update({name: str(self.caches / what) for name, what in _CACHES.items()})
        if not self.allowed.network:
            for name, word in _OFFLINE.items():
                # A tracker that the user has turned off stays off.
                if found.get(name) != "disabled":
                    found[name] = word
        tracking = own / "mlflow"
        if "://" in found.get("MLFLOW_TRACKING_URI", "") and not self.allowed.network:
            found["MLFLOW_TRACKING_URI"] = tracking.as_uri()
        if records is None:
            discarded = own / "records"
            discarded.mkdir(exist_ok=True)
            # Records are removed with the sandbox, so none is kept for later.
            found |= {"GRUYERE_RECORD_DIR": str(discarded), "GRUYERE_SANDBOX": "1"}
        else:
            found["GRUYERE_RECORD_DIR"] = records
        if self.way == LANDLOCK:
            temporary = own / "tmp"
            temporary.mkdir(exist_ok=True)
            found.update(dict.fromkeys(("TMPDIR", "TMP", "TEMP"), str(temporary)))
            found["PWD"] = mirror + cwd
            if found.get("HOME", "").startswith("/"):
                found["HOME"] = mirror + found["HOME"]
            # Bytecode could not be written beside modules outside the run's folder.
            found["PYTHONDONTWRITEBYTECODE"] = "1"
        return found


# The package's folder, and code that imports it from there whatever the interpreter's options.
_PACKAGES = Path(__file__).resolve().parent.parent.parent
_ENTER = """
import sys
sys.path.insert(0, sys.argv[1])
from gruyere._sandbox.enter import main
main(sys.argv[2])
"""


# Parts of the messages with which programs fail, by the kind of the refusal.
_WORDS = {
    "write": ("permission denied", "read-only file system", "operation not permitted",
              "cannot be opened", "can't open", "unable to open", "readonly database"),
    "space": ("no space left",),
    "socket": ("permission denied",),
    "network": ("unreachable", "name resolution", "name or service", "connect", "resolve"),
}  # fmt: skip


def behind(said: str, refused: list[dict[str, str]]) -> list[dict[str, str]]:
    """The refusals that may be the cause of a failure with the output `said`."""
    lower = said.lower()
    return [
        one
        for one in refused
        if os.path.basename(one["name"]) in said
        or any(word in lower for word in _WORDS[one["kind"]])
    ]


# What an overlay cannot do; the folder of each would have to be without one.
_OF_FOLDER = {
    "rename": "The sandbox cannot rename {name}, a folder that was there before the run",
    "move": "The sandbox cannot rename {name} to {to}, which is in another of its overlays",
    "replace": "The sandbox cannot replace, rename or remove {name}, which is a mount in it",
}


def remedy(refused: dict[str, str]) -> str:
    """What was refused, and the option that allows it."""
    kind, name = refused["kind"], refused["name"]
    if kind == "network":
        return f"The sandbox has no network, and the program needs {name}: use --allow-network"
    if kind == "socket":
        return f"The sandbox does not allow connections to {name}: use --allow-network"
    if kind == "space":
        return f"There is no room to copy {name}, to which the program writes: use --scratch SIZE"
    if kind in _OF_FOLDER:
        said = _OF_FOLDER[kind].format(**refused)
        if refused["folder"] == "/":
            return f"{said}: --allow-writes runs it without a sandbox"
        return f"{said}: use --allow-writes={refused['folder']}, which keeps what is written"
    return (
        f"The sandbox does not allow writes to {name}: use --allow-writes={name} (or a folder "
        "above it), which keeps what is written"
    )


def remedy_for_stdin(error: BaseException) -> str:
    """What to do about an error of input(), since the program's stdin is empty; "" for others."""
    # The words tell it from the end of another file, as pickle reports it.
    if not isinstance(error, EOFError) or str(error) != "EOF when reading a line":
        return ""
    return (
        "The program's stdin is empty here: pass what it asks for as arguments, or in a file that "
        "it opens"
    )


def choose(folder: Path, asked: dict[str, Any]) -> Box:
    """The sandbox in the first way that works here. `asked`: the command's options
    (crates/cli/src/sandbox.rs).

    Raises GruyereError if none works.
    """
    paths = tuple(os.path.abspath(path) for path in asked["allow_writes"] if path)
    allowed = Allowed("" in asked["allow_writes"], paths, asked["allow_network"])
    room = asked["scratch"]
    for path in paths:
        if not os.path.exists(path):
            raise GruyereError(f"--allow-writes={path}: no such file or folder; create it first")
    if allowed.everything:
        return Box(folder, NONE, allowed, room)
    reasons = []
    for way, why_not in ((OVERLAY, ""), (LANDLOCK, landlock.why_not())):
        # Without the paths that the user allows: our own folder may be below one of them.
        why_not = why_not or _try(Box(folder, way, Allowed(network=allowed.network), room))
        if not why_not:
            return Box(folder, way, allowed, room)
        reasons.append(f"{way}: {why_not}")
    raise GruyereError(
        "no sandbox can be set up here, so the program would overwrite its files "
        f"({'; '.join(reasons)}). {_remedy_for_none(reasons)}"
    )


def _remedy_for_none(reasons: list[str]) -> str:
    """What to do where no sandbox works; `reasons`: why each way does not."""
    other = (
        "a kernel with Landlock (5.13 or newer) or a container that allows user namespaces; or "
        "copy your folder and run the program there with --allow-writes"
    )
    if any(reason.endswith(_NO_ANSWER) for reason in reasons):
        return f"The machine may be busy: try again. If it is not, use {other}"
    return f"Use {other}"


# The test program: reads, writes and removes files, makes a folder, and tries to connect.
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
    """Test the sandbox. Returns why it does not work; empty if it does."""
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
                return _NO_ANSWER
            finally:
                run.end()
            output.seek(0)
            said = output.read().decode(errors="replace").strip().splitlines()
        kept = all((files / name).is_file() for name in ("kept", "gone"))
        if not kept or (files / "kept").read_text() != "before" or os.listdir(files / "folder"):
            return "what is written inside it changes the real files"
        if code:
            reason = said[-1] if said else f"exit code {code}"
            return reason.removeprefix("the sandbox could not be made: ")
        return ""
    finally:
        remove(folder)
        remove(files)
