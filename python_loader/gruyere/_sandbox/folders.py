"""Folders to which a program may write meanwhile: opened and removed without following a link that
the program has put there. We may write where the program may not, so its links must not lead us.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Optional

_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def beneath(root: int, inside: str) -> Iterator[int]:
    """The folder `inside` the folder of the descriptor `root`, as a descriptor for names in it.
    Raises OSError if there is a link on the way."""
    here = os.open(".", os.O_PATH | _FOLDER, dir_fd=root)
    try:
        for part in inside.split("/"):
            if part in ("", "."):
                continue
            if part == "..":
                raise ValueError(f"{inside} may lead out")
            there = os.open(part, os.O_PATH | _FOLDER, dir_fd=here)
            os.close(here)
            here = there
        yield here
    finally:
        os.close(here)


def remove(path: Path) -> None:
    """Remove a folder, including folders without access permissions, as overlays leave behind. What
    cannot be removed is left."""
    try:
        parent = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        remove_in(parent, path.name)
    finally:
        os.close(parent)


def empty(path: Path, but: str) -> None:
    """Remove all that is in a folder, but for the entry `but`. What cannot be removed is left."""
    try:
        top = os.open(path, os.O_RDONLY | _FOLDER)
    except OSError:
        return
    try:
        _clear(top, but)
    finally:
        os.close(top)


def remove_in(folder: int, name: str) -> None:
    """Remove an entry of the folder of the descriptor, and all that is in it."""
    top = _opened(folder, name)
    if top is None:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=folder)
        return
    try:
        _clear(top)
    finally:
        os.close(top)
    with contextlib.suppress(OSError):
        os.rmdir(name, dir_fd=folder)


def _clear(top: int, but: str = "") -> None:
    # Folders further down are moved up here before they are emptied: a program may nest them deeper
    # than we can have descriptors, or calls.
    waiting = _empty(top, top, but)
    while waiting:
        inner = waiting.pop()
        here = _opened(top, inner)
        if here is None:
            continue
        try:
            waiting += _empty(here, top)
        finally:
            os.close(here)
        with contextlib.suppress(OSError):
            os.rmdir(inner, dir_fd=top)


def _empty(here: int, top: int, but: str = "") -> list[str]:
    """Remove the files in the folder `here`, except `but`, and move its folders to `top`. Returns
    their names."""
    found = []
    try:
        with os.scandir(here) as entries:
            known = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    except OSError:
        return []
    for name, is_folder in known:
        if name == but:
            continue
        with contextlib.suppress(OSError):
            if not is_folder:
                os.unlink(name, dir_fd=here)
            elif here == top:
                found.append(name)
            else:
                # The kernel moves a folder only if it can be written to.
                inner = _opened(here, name)
                if inner is not None:
                    os.close(inner)
                moved = secrets.token_hex(16)
                os.rename(name, moved, src_dir_fd=here, dst_dir_fd=top)
                found.append(moved)
    return found


def _opened(folder: int, name: str) -> Optional[int]:
    """Open a folder in the folder of the descriptor, with all permissions; None if it is none or
    cannot be opened."""
    try:
        handle = os.open(name, os.O_PATH | _FOLDER, dir_fd=folder)
    except OSError:
        return None
    try:
        # The entry in /proc leads to the open folder itself, whatever its name leads to now.
        with contextlib.suppress(OSError):
            os.chmod(f"/proc/self/fd/{handle}", 0o700)
        return os.open(".", os.O_RDONLY | _FOLDER, dir_fd=handle)
    except OSError:
        return None
    finally:
        os.close(handle)
