"""Whose a run's folder is: that of the processes which hold the lock of a file in it: ours, and
those between us and the programs (`enter`). The kernel releases the lock however they end, so a
later run can remove what a killed one has left.

The file has the number of the kernel's boot in it, since not every network file system knows of
other hosts' locks. So what was left before a boot stays.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
from collections.abc import Iterable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Iterator, Optional

from .folders import empty

_LOCK = "lock-of-gruyere"
# The names that `Folder` gives.
_NAME = re.compile(r"gruyere-(?:bench|dryrun|stand-in|test)-[a-z0-9_]{8}")
# The locks of this process's folders, by their paths.
_held: dict[Path, int] = {}


def own(folder: Path) -> None:
    """Own the folder until `release`. Where there are no locks, nobody removes it in our place."""
    new = folder / f"{_LOCK}.new"
    handle = None
    try:
        handle = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.write(handle, _boot())
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # It has its name only now, so that nobody sees it unlocked.
        os.rename(new, folder / _LOCK)
        _held[folder] = handle
    except OSError:
        if handle is not None:
            os.close(handle)


def locks(folder: Path) -> tuple[int, ...]:
    """The descriptors with which a process shares in owning the folder."""
    return (_held[folder],) if folder in _held else ()


def release(folder: Path) -> None:
    """Remove the folder, and own it no more."""
    _remove(folder)
    handle = _held.pop(folder, None)
    if handle is not None:
        os.close(handle)
        # NFS keeps a removed file under another name until it is closed.
        with suppress(OSError):
            os.rmdir(folder)


def _remove(folder: Path) -> None:
    """Remove a folder. The lock goes last, and only if nothing else is left: until then a later run
    may go on with a removal that was interrupted."""
    empty(folder, _LOCK)
    with suppress(OSError):
        if os.listdir(folder) == [_LOCK]:
            os.unlink(folder / _LOCK)
        os.rmdir(folder)


def sweep(bases: Iterable[str]) -> None:
    """Remove this user's folders in `bases` whose owners are gone."""
    for base in bases:
        try:
            if not _is_ours_to_sweep(os.stat(base)):
                continue
            names = [name for name in os.listdir(base) if _NAME.fullmatch(name)]
        except OSError:
            continue
        for name in names:
            path = Path(base, name)
            try:
                with _left_behind(path):
                    _remove(path)
                os.rmdir(path)
            except OSError:
                # Another's, still owned, or gone.
                continue


def _is_ours_to_sweep(base: os.stat_result) -> bool:
    """Whether no other user can put another folder in place of one of ours there."""
    is_shared = bool(base.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    is_sticky = bool(base.st_mode & stat.S_ISVTX)
    return base.st_uid in (0, os.geteuid()) and (is_sticky or not is_shared)


@contextmanager
def _left_behind(path: Path) -> Iterator[None]:
    """Hold the lock of a folder whose owner is gone. Raises OSError if there is no such folder."""
    with _opened(str(path), os.O_DIRECTORY) as folder:
        with _opened(_LOCK, os.O_NONBLOCK, folder) as lock:
            if not stat.S_ISREG(os.fstat(lock).st_mode) or os.read(lock, 1024) != _boot():
                raise PermissionError
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield


@contextmanager
def _opened(name: str, flags: int, folder: Optional[int] = None) -> Iterator[int]:
    """A descriptor of what this user has at `name`, which may be no link."""
    flags |= os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(name, flags, dir_fd=folder)
    try:
        if os.fstat(handle).st_uid != os.geteuid():
            raise PermissionError
        yield handle
    finally:
        os.close(handle)


def _boot() -> bytes:
    return Path("/proc/sys/kernel/random/boot_id").read_bytes()
