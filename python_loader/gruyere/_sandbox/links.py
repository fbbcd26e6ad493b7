"""The program's files in a folder of ours, by links: its working folder and its home look there as
they are, and what is written to a link is written to a copy.

The mirror has the tree from `/` on, as far as the program needs it: a folder is a folder, or a link
that becomes one when something is about to change in it. Small files of the working folder are
copied at once, so that a script finds itself in the mirror, whichever way it asks.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections import deque
from pathlib import Path
from typing import Optional

# Entries of the working folder that are mirrored one by one; folders beyond are links (a data set
# of a million files costs nothing).
_ENTRIES = 2_000
# The largest file that is copied, and the most bytes of all copies.
_SMALL, _COPIES = 256 << 10, 64 << 20
# Links to links, as the kernel counts them.
_LOOPS = 40


class Full(Exception):
    """A copy would take more than the folder may hold."""


class Mirror:
    def __init__(self, folder: str, hidden: str, writable: list[str], room: int) -> None:
        """`hidden`: a folder that is not mirrored, ours. `writable`: paths that the program writes
        to itself. `room`: bytes that copies may take."""
        self.folder = folder
        self.hidden = hidden
        self.writable = set(writable)
        self.room = room
        # By device and inode: known wherever the program moves them.
        self.links: set[tuple[int, int]] = set()

    def of(self, path: str) -> str:
        """Where a path of the program's is in the mirror."""
        return self.folder + path if path != "/" else self.folder

    def make(self, working_folder: str, others: list[str]) -> None:
        """All of the working folder, and the way to it and to the others."""
        os.makedirs(self.folder, exist_ok=True)
        self._fill(self.folder, "/")
        for path in (working_folder, *others):
            self._walk(self.of(path), follow=True, expand_last=True)
        self._deepen(working_folder)

    def _deepen(self, working_folder: str) -> None:
        """Folders of the working folder become folders, the nearest first."""
        entries, copied = 0, 0
        waiting = deque([self.of(working_folder)])
        while waiting:
            here = waiting.popleft()
            try:
                found = sorted(os.scandir(here), key=lambda entry: entry.name)
            except OSError:
                continue
            entries += len(found)
            if entries > _ENTRIES:
                return
            for entry in found:
                if not entry.is_symlink() or not self._is_ours(entry.path):
                    continue
                if os.path.isdir(entry.path):
                    # An environment, a history: the program does not write there, and they are
                    # large.
                    original = os.readlink(entry.path)
                    is_kept = entry.name == ".git" or os.path.exists(f"{original}/pyvenv.cfg")
                    if not is_kept and self._expand(entry.path):
                        waiting.append(entry.path)
                elif os.path.isfile(entry.path):
                    size = os.stat(entry.path).st_size
                    if size <= _SMALL and copied + size <= _COPIES and self._copy(entry.path):
                        copied += size

    # The guard calls these just before the program acts.

    def ready_to_write(self, path: str, truncates: bool = False) -> None:
        """A file may be written to, or a folder changed. Raises Full."""
        here = self._walk(path, follow=True)
        if here is None or not self._is_ours(here):
            return
        if os.path.isdir(here):
            self._expand(here)
        elif os.path.isfile(here):
            self._copy(here, 0 if truncates else None)

    def ready_entry(self, path: str) -> None:
        """The entry itself may be made, removed or replaced."""
        here = self._walk(path, follow=False)
        # Else a folder could be unlinked, or renamed over, like a file.
        if here is not None and self._is_ours(here) and os.path.isdir(here):
            self._expand(here)

    def has(self, path: str) -> bool:
        return path == self.folder or path.startswith(self.folder + "/")

    def _walk(self, path: str, follow: bool, expand_last: bool = False) -> Optional[str]:
        """The path with no link on the way: those of ours are folders then. None where it leads out
        of the mirror."""
        if not self.has(path):
            return None
        here = self.folder
        rest = deque(path[len(self.folder) :].split("/"))
        loops = 0
        while rest:
            part = rest.popleft()
            if part in ("", "."):
                continue
            if part == "..":
                here = os.path.dirname(here) if here != self.folder else here
                continue
            there = f"{here}/{part}"
            is_last = not any(more not in ("", ".") for more in rest)
            if not os.path.islink(there) or (is_last and not follow):
                here = there
                continue
            if self._is_ours(there):
                if (not is_last or expand_last) and os.path.isdir(there):
                    self._expand(there)
                here = there
                continue
            loops += 1
            if loops > _LOOPS:
                return None
            target = os.readlink(there)
            if target.startswith("/"):
                if not self.has(target):
                    return None
                here, target = self.folder, target[len(self.folder) :]
            rest.extendleft(reversed(target.split("/")))
        return here

    def _is_ours(self, path: str) -> bool:
        try:
            told = os.lstat(path)
        except OSError:
            return False
        return stat.S_ISLNK(told.st_mode) and (told.st_dev, told.st_ino) in self.links

    def _link(self, original: str, here: str) -> None:
        os.symlink(original, here)
        told = os.lstat(here)
        self.links.add((told.st_dev, told.st_ino))

    def _forget(self, here: str) -> None:
        told = os.lstat(here)
        self.links.discard((told.st_dev, told.st_ino))

    def _fill(self, here: str, original: str) -> None:
        """Entries of a folder, each as a link."""
        with os.scandir(original) as entries:
            for entry in entries:
                there = f"{here}/{entry.name}"
                if entry.path == self.hidden or os.path.lexists(there):
                    continue
                if entry.path in self.writable:
                    os.symlink(entry.path, there)
                elif entry.is_symlink():
                    target = os.readlink(entry.path)
                    # A link of the user's leads to the mirror's file too.
                    os.symlink(self.of(target) if target.startswith("/") else target, there)
                else:
                    self._link(entry.path, there)

    def _expand(self, here: str) -> bool:
        """Makes a folder of a link to one; False where it can't be read."""
        original = os.readlink(here)
        part = f"{here}.gruyere-part"
        try:
            mode = stat.S_IMODE(os.stat(original).st_mode)
            os.mkdir(part)
            self._fill(part, original)
        except OSError:
            shutil.rmtree(part, ignore_errors=True)
            return False
        # Whole or not at all. A folder can't be renamed over a link.
        self._forget(here)
        os.unlink(here)
        os.rename(part, here)
        os.chmod(here, mode | stat.S_IRWXU)
        return True

    def _copy(self, here: str, length: Optional[int] = None) -> bool:
        """Makes a file of a link to one: a copy of its first `length` bytes. Raises Full."""
        original = os.readlink(here)
        part = f"{here}.gruyere-part"
        try:
            told = os.stat(original)
            size = told.st_size if length is None else length
            if size > self.room:
                raise Full(original)
            with open(original, "rb") as source, open(part, "wb") as target:
                if size:
                    shutil.copyfileobj(source, target, 1 << 20)
            os.chmod(part, stat.S_IMODE(told.st_mode))
            os.utime(part, ns=(told.st_atime_ns, told.st_mtime_ns))
        except OSError:
            Path(part).unlink(missing_ok=True)
            return False
        self._forget(here)
        os.rename(part, here)
        return True
