"""A mirror of the program's files in the run's folder, made of links. Its working folder and its
home look the same there, and a write to a link goes to a copy.

The mirror contains the tree from `/` as far as the program needs it. A folder is mirrored as a
folder, or as a link that becomes a folder before something changes in it. Small files of the
working folder are copied at once, so that a script that looks up its own path finds the mirror.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections import deque
from pathlib import Path
from typing import Optional

# The number of entries of the working folder that are mirrored one by one; further folders are
# links, so a data set of a million files costs nothing.
_ENTRIES = 2_000
# The largest file that is copied at once, and the limit on the bytes of all such copies.
_SMALL, _COPIES = 256 << 10, 64 << 20
# The limit on links to links, as in the kernel.
_LOOPS = 40


class Full(Exception):
    """A copy would exceed the room for copies."""


class Mirror:
    def __init__(self, folder: str, hidden: str, writable: list[str], room: int) -> None:
        """`hidden`: our own folder, which is not mirrored. `writable`: paths to which the program
        writes directly. `room`: bytes that copies may take."""
        self.folder = folder
        self.hidden = hidden
        self.writable = set(writable)
        self.room = room
        # By device and inode, so that they are recognised after the program moves them.
        self.links: set[tuple[int, int]] = set()

    def of(self, path: str) -> str:
        """The path in the mirror for a path of the program."""
        return self.folder + path if path != "/" else self.folder

    def make(self, working_folder: str, others: list[str]) -> None:
        """Mirror the working folder, and the paths to it and to the others."""
        os.makedirs(self.folder, exist_ok=True)
        self._fill(self.folder, "/")
        for path in (working_folder, *others):
            self._walk(self.of(path), follow=True, expand_last=True)
        self._deepen(working_folder)

    def _deepen(self, working_folder: str) -> None:
        """Expand folders of the working folder, the nearest first."""
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
                    # Skip virtual environments and .git: they are large, and the program does not
                    # write there.
                    original = os.readlink(entry.path)
                    is_kept = entry.name == ".git" or os.path.exists(f"{original}/pyvenv.cfg")
                    if not is_kept and self._expand(entry.path):
                        waiting.append(entry.path)
                elif os.path.isfile(entry.path):
                    size = os.stat(entry.path).st_size
                    if size <= _SMALL and copied + size <= _COPIES and self._copy(entry.path):
                        copied += size

    # The guard calls these just before the program's call goes on.

    def ready_to_write(self, path: str, truncates: bool = False) -> None:
        """Prepare a write to a file, or a change of a folder. Raises Full."""
        here = self._walk(path, follow=True)
        if here is None or not self._is_ours(here):
            return
        if os.path.isdir(here):
            self._expand(here)
        elif os.path.isfile(here):
            self._copy(here, 0 if truncates else None)

    def ready_entry(self, path: str) -> None:
        """Prepare the creation, removal or replacement of an entry."""
        here = self._walk(path, follow=False)
        # A folder that is still a link could be unlinked, or renamed over, like a file.
        if here is not None and self._is_ours(here) and os.path.isdir(here):
            self._expand(here)

    def has(self, path: str) -> bool:
        return path == self.folder or path.startswith(self.folder + "/")

    def _walk(self, path: str, follow: bool, expand_last: bool = False) -> Optional[str]:
        """The path with all links on the way resolved; our own links become folders. None if it
        leads out of the mirror."""
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
        """Link the entries of the folder `original` into `here`."""
        with os.scandir(original) as entries:
            for entry in entries:
                there = f"{here}/{entry.name}"
                if entry.path == self.hidden or os.path.lexists(there):
                    continue
                if entry.path in self.writable:
                    os.symlink(entry.path, there)
                elif entry.is_symlink():
                    target = os.readlink(entry.path)
                    # The user's own links must lead to files in the mirror.
                    os.symlink(self.of(target) if target.startswith("/") else target, there)
                else:
                    self._link(entry.path, there)

    def _expand(self, here: str) -> bool:
        """Replace a link to a folder by a folder. Returns False if it cannot be read."""
        original = os.readlink(here)
        part = f"{here}.gruyere-part"
        try:
            mode = stat.S_IMODE(os.stat(original).st_mode)
            os.mkdir(part)
            self._fill(part, original)
        except OSError:
            shutil.rmtree(part, ignore_errors=True)
            return False
        # Atomic except for the moment after unlink: a folder cannot be renamed over a link.
        self._forget(here)
        os.unlink(here)
        os.rename(part, here)
        os.chmod(here, mode | stat.S_IRWXU)
        return True

    def _copy(self, here: str, length: Optional[int] = None) -> bool:
        """Replace a link to a file by a copy of the file's first `length` bytes (None: all). Raises
        Full."""
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
