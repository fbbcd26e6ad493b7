"""Whose a run's folder is: that of the process which holds the lock of a file in it. The kernel
releases the lock however the process ends, so a later run can remove what a killed one has left.

The file has the host's name in it, since not every network file system knows of other hosts' locks.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import stat
import time
from collections.abc import Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Callable, Iterator, Optional

_LOCK = "lock-of-gruyere"
# The names that `Folder` gives.
_NAME = re.compile(r"gruyere-(?:bench|dryrun|stand-in|test)-[a-z0-9_]{8}")
# Seconds for which a folder stays after its last change: processes of its run may still be ending.
_STAYS = 60.0


def own(folder: Path) -> Optional[int]:
    """Own the folder as long as this process lives. Returns the lock's descriptor, or None where
    there are no locks: nobody then removes the folder in our place."""
    new = folder / f"{_LOCK}.new"
    handle = None
    try:
        handle = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.write(handle, _host())
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # It has its name only now, so that nobody sees it unlocked.
        os.rename(new, folder / _LOCK)
        return handle
    except OSError:
        if handle is not None:
            os.close(handle)
        return None


def sweep(bases: Iterable[str], remove: Callable[[Path], None]) -> None:
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
                    remove(path)
            except OSError:
                # Another's, still owned, or just removed by somebody else.
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
        if time.time() - os.fstat(folder).st_mtime < _STAYS:
            raise BlockingIOError
        with _opened(_LOCK, os.O_NONBLOCK, folder) as lock:
            if not stat.S_ISREG(os.fstat(lock).st_mode) or os.read(lock, 1024) != _host():
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


def _host() -> bytes:
    return os.fsencode(socket.gethostname())
