"""The folders in which shims are stored: only their user can write to them, and one process at a
time builds there."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Optional

from .. import _errors
from .._files import replacing

# How long to wait for another process's build before going on without a shim. A build takes 12 s
# of a core, and several times that on a node whose ranks all start at once.
TURN_SECONDS = 60
# How long a process waits before it prints a line.
_QUIET_SECONDS = 1
# A shim is 0.3 MB, and the compiler writes temporary files.
_ROOM_BYTES = 16 << 20
# Files of a build that are older than this were left behind: no build takes so long.
_STALE_SECONDS = 3600
BUILDING = ".building-"


class Unavailable(Exception):
    """There is no usable shim; the message says why."""


def home() -> Path:
    """The user's own folder for shims. Raises Unavailable if there can be none."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    # The specification says to ignore a relative path.
    root = Path(chosen) if os.path.isabs(chosen) else Path(os.path.expanduser("~")) / ".cache"
    if not root.is_absolute():
        raise Unavailable(
            "this user has no home directory to store the shim in; set XDG_CACHE_HOME to an "
            "absolute path"
        )
    return _prepared(root / "gruyere", "set XDG_CACHE_HOME to a writable folder")


def temporary() -> Path:
    """The folder for shims that is used if the home directory is full or read-only, or if no
    library can be loaded from it. It lasts until the machine restarts."""
    try:
        root = Path(tempfile.gettempdir())
        about = root.stat()
        # A user that may rename entries of `root` could replace the folder by another.
        is_open = about.st_mode & 0o022 and not about.st_mode & stat.S_ISVTX
        if is_open or about.st_uid not in (0, os.geteuid()):
            raise Unavailable(
                f"other users may rename files in {root}: set TMPDIR to another folder"
            )
    except OSError as error:
        raise Unavailable(f"there is no temporary folder ({error})") from error
    return _prepared(root / f"gruyere-{os.geteuid()}", "set TMPDIR to another folder")


def _prepared(above: Path, remedy: str) -> Path:
    try:
        above.parent.mkdir(parents=True, exist_ok=True)
        # A user that may write to the folder above could replace the folder by another.
        _make_private(above, 0o022, remedy)
        folder = _make_private(above / "shims", 0o077, remedy)
        if os.statvfs(folder).f_flag & os.ST_NOEXEC:
            raise Unavailable(
                f"libraries cannot be loaded from {folder}, which is mounted noexec; {remedy}"
            )
        return folder
    except OSError as error:
        raise Unavailable(f"there is no folder to store the shim in ({error}); {remedy}") from error


def _make_private(folder: Path, closed: int, remedy: str) -> Path:
    """Make `folder` and remove the permission bits `closed`. Raises Unavailable if it is not a
    folder of this user, or keeps the bits."""
    folder.mkdir(mode=0o700, exist_ok=True)
    about = folder.lstat()
    if stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid() and about.st_mode & closed:
        folder.chmod(stat.S_IMODE(about.st_mode) & ~closed)
        about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & closed:
        raise Unavailable(f"{folder} is not a private folder of this user; remove it, or {remedy}")
    return folder


def check_owner(file: Path) -> None:
    """Raises Unavailable if another user can change what is loaded."""
    # In the sandbox of links (`_sandbox/links.py`) it is a link to the user's own.
    real = file.resolve()
    told = (real.lstat(), real.parent.lstat())
    is_private = all(one.st_uid == os.geteuid() and not one.st_mode & 0o022 for one in told)
    if not stat.S_ISREG(told[0].st_mode) or not is_private:
        raise Unavailable(f"{file} is not a file that only this user can write to; remove it")


def has_room(folder: Path) -> bool:
    """Whether `folder` has room for a build. Quotas are not taken into account."""
    about = os.statvfs(folder)
    return about.f_bavail * about.f_frsize >= _ROOM_BYTES


def sweep(folder: Path) -> None:
    """Remove the files of builds that were killed together with their process."""
    for left in folder.glob(f"{BUILDING}*"):
        with contextlib.suppress(OSError):
            if time.time() - left.lstat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(left, ignore_errors=True)


def remember(failed: Path, why: str) -> None:
    """Record that building is futile, by writing `failed` atomically."""
    with contextlib.suppress(OSError), replacing(failed, ".failing-") as unfinished:
        unfinished.write(f"{why}\n".encode())


def say(line: str) -> None:
    """Print a line to stderr, not as a warning: the process is waiting now."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        _errors.say(f"gruyere: {line}")


@contextlib.contextmanager
def alone(folder: Path, known: Callable[[], Optional[Path]]) -> Iterator[Optional[Path]]:
    """Hold the folder's lock, so that one process at a time builds. Yields None with the lock held,
    or, without it, the shim that another process has built meanwhile (`known`).

    On a file system without locks (some NFS) several processes may build at once: each renames its
    shim into place. Raises Unavailable if the process that holds the lock is stopped or does not
    finish.
    """
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
                        f"waiting for {holder}, which is building the native door's shim, for "
                        f"{TURN_SECONDS} s at most"
                    )
                time.sleep(0.1)
                found = known()
                continue
            except OSError:
                # This file system has no locks.
                pass
            break
        yield found
    finally:
        os.close(descriptor)


def _holder(descriptor: int) -> tuple[str, bool]:
    """The process that holds the lock, and whether it is stopped (by a debugger or ^Z), in which
    case it will not release the lock. A process on another node of a cluster is not visible."""
    with contextlib.suppress(OSError, IndexError):
        about = os.fstat(descriptor)
        file = f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}:{about.st_ino}"
        for line in Path("/proc/locks").read_text().splitlines():
            # 1: FLOCK ADVISORY WRITE PID DEVICE:FILE 0 EOF. The pid is 0 in another namespace.
            words = line.split()
            is_ours = words[1] == "FLOCK" and words[5:6] == [file]
            if is_ours and words[4].isdigit() and words[4] != "0":
                state = Path(f"/proc/{words[4]}/stat").read_text().rpartition(")")[2].split()[0]
                return f"process {words[4]}", state in "Tt"
    return "another process", False


def _held(folder: Path, holder: str, is_stopped: bool) -> Unavailable:
    """The error for a lock that another process does not release."""
    since = "and is stopped" if is_stopped else f"for more than {TURN_SECONDS} s"
    return Unavailable(
        f"{holder} has been building the shim in {folder} {since}: resume it or kill it, and start "
        "again"
    )
