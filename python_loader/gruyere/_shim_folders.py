"""Where shims are kept: folders that only their user can write to, in which one process at a time
builds."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Optional

# How long another process may build before this one goes on without. A build takes 12 s of a core,
# and several times that on a node whose ranks all start at once.
TURN_SECONDS = 60
# How long a process waits silently.
_QUIET_SECONDS = 1
# A build is 0.3 MB, and the compiler writes some more meanwhile.
_ROOM_BYTES = 16 << 20
# Unowned files in a folder are older than any build.
_STALE_SECONDS = 3600
BUILDING = ".building-"


class Unavailable(Exception):
    """There is no shim here; the text says why."""


def home() -> Path:
    """The user's own folder for shims. Raises Unavailable where there can be none."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    # The specification says to ignore a relative path.
    root = Path(chosen) if os.path.isabs(chosen) else Path(os.path.expanduser("~")) / ".cache"
    if not root.is_absolute():
        raise Unavailable(
            "this user has no home to keep the shim in; name an absolute folder in XDG_CACHE_HOME"
        )
    return _prepared(root / "gruyere", "name one that can be written in XDG_CACHE_HOME")


def temporary() -> Path:
    """Another, for a home that is full or cannot be written, or from which no library can be
    loaded; it lasts until the machine starts again."""
    try:
        root = Path(tempfile.gettempdir())
        about = root.stat()
        # A user that may rename its entries could put another folder in its place.
        is_open = about.st_mode & 0o022 and not about.st_mode & stat.S_ISVTX
        if is_open or about.st_uid not in (0, os.geteuid()):
            raise Unavailable(f"others may rename what lies in {root}: name another in TMPDIR")
    except OSError as error:
        raise Unavailable(f"there is no temporary folder ({error})") from error
    return _prepared(root / f"gruyere-{os.geteuid()}", "name another in TMPDIR")


def _prepared(above: Path, remedy: str) -> Path:
    try:
        above.parent.mkdir(parents=True, exist_ok=True)
        # A user that may write to the folder above could put another in its place.
        _make_private(above, 0o022, remedy)
        folder = _make_private(above / "shims", 0o077, remedy)
        if os.statvfs(folder).f_flag & os.ST_NOEXEC:
            raise Unavailable(
                f"no library can be loaded from {folder} (it is mounted noexec); {remedy}"
            )
        return folder
    except OSError as error:
        raise Unavailable(
            f"there is no folder to keep the shim in ({error}); {remedy}"
        ) from error


def _make_private(folder: Path, closed: int, remedy: str) -> Path:
    """A folder of this user's, with the bits of `closed` taken away from others."""
    folder.mkdir(mode=0o700, exist_ok=True)
    about = folder.lstat()
    if stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid() and about.st_mode & closed:
        folder.chmod(stat.S_IMODE(about.st_mode) & ~closed)
        about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & closed:
        raise Unavailable(f"{folder} is not a folder of this user's alone; remove it, or {remedy}")
    return folder


def check_owner(file: Path) -> None:
    about = file.lstat()
    if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o022:
        raise Unavailable(f"{file} is not a file that only this user can write; remove it")


def has_room(folder: Path) -> bool:
    """Whether it is worth a build. A quota does not show here."""
    about = os.statvfs(folder)
    return about.f_bavail * about.f_frsize >= _ROOM_BYTES


def sweep(folder: Path) -> None:
    """Removes what builds have left that were killed with everything around them."""
    for left in folder.glob(f"{BUILDING}*"):
        with contextlib.suppress(OSError):
            if time.time() - left.lstat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(left, ignore_errors=True)


def remember(failed: Path, why: str) -> None:
    """Writes down, whole or not at all, that a build is in vain."""
    with contextlib.suppress(OSError):
        descriptor, name = tempfile.mkstemp(prefix=".failing-", dir=failed.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as to:
                to.write(f"{why}\n")
            os.rename(name, failed)
        except OSError:
            os.unlink(name)


def say(line: str) -> None:
    """A line of this process's own: the process waits now, whatever becomes of warnings."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(f"gruyere: {line}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def alone(folder: Path, known: Callable[[], Optional[Path]]) -> Iterator[Optional[Path]]:
    """One process at a time; or, without a turn, what another has built meanwhile (`known`). Where
    the file system knows no locks (some NFS), several may build at once: each renames its own into
    place. Raises Unavailable where another process is stopped, or does not come to an end."""
    import fcntl

    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    found = None
    try:
        start, is_said = time.monotonic(), False
        while not found:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waited = time.monotonic() - start
                holder, is_stopped = _holder(descriptor)
                if is_stopped or waited >= TURN_SECONDS:
                    raise _held(folder, holder, is_stopped) from None
                if waited >= _QUIET_SECONDS and not is_said:
                    is_said = True
                    say(
                        f"waits for {holder}, which builds the native door's shim, for "
                        f"{TURN_SECONDS} s at most"
                    )
                time.sleep(0.1)
                found = known()
                continue
            except OSError:
                # No locks here.
                pass
            break
        yield found
    finally:
        os.close(descriptor)


def _holder(descriptor: int) -> tuple[str, bool]:
    """Who has the lock, and whether it is stopped (by a debugger, by ^Z): then it never gives the
    lock back by itself. On another node of a cluster it is not seen."""
    with contextlib.suppress(OSError, IndexError):
        about = os.fstat(descriptor)
        file = f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}:{about.st_ino}"
        for line in Path("/proc/locks").read_text().splitlines():
            # 1: FLOCK ADVISORY WRITE PID DEVICE:FILE 0 EOF. The pid is 0 in another's namespace.
            words = line.split()
            is_ours = words[1] == "FLOCK" and words[5:6] == [file]
            if is_ours and words[4].isdigit() and words[4] != "0":
                state = Path(f"/proc/{words[4]}/stat").read_text().rpartition(")")[2].split()[0]
                return f"process {words[4]}", state in "Tt"
    return "another process", False


def _held(folder: Path, holder: str, is_stopped: bool) -> Unavailable:
    """Another process keeps the lock of the folder."""
    since = "and is stopped" if is_stopped else f"for {TURN_SECONDS} s and more"
    return Unavailable(
        f"{holder} has been building the shim in {folder} {since}: let it go on or end it, and "
        "start again"
    )
