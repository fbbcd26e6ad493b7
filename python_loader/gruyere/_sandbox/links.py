"""A mirror of the program's files in the run's folder, made of links. Its working folder and its
home look the same there, and a write to a link goes to a copy.

The mirror contains the tree from `/` as far as the program needs it. A folder is mirrored as a
folder, or as a link that becomes a folder before something changes in it. Small files of the
working folder are copied at once, so that a script that looks up its own path finds the mirror.

We may write where the program may not, and it may change the mirror while we do. So everything that
we make is made in a folder of our own, under a name that nobody else has, and then moved to its
place by descriptors: no link of the program's is followed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
from collections import deque
from collections.abc import Iterator
from typing import Optional

from . import folders

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
        # What they lead to, by device and inode, so that they are recognised after the program
        # moves them.
        self.links: dict[tuple[int, int], str] = {}

    def of(self, path: str) -> str:
        """The path in the mirror for a path of the program."""
        return self.folder + path if path != "/" else self.folder

    def make(self, working_folder: str, others: list[str]) -> None:
        """Mirror the working folder, and the paths to it and to the others."""
        parts = os.path.join(self.hidden, "parts")
        for path in (self.folder, parts):
            os.makedirs(path, exist_ok=True)
        self.root = os.open(self.folder, os.O_PATH | os.O_DIRECTORY)
        # Beside the mirror, on the same file system.
        self.parts = os.open(parts, os.O_PATH | os.O_DIRECTORY)
        self._fill(self.root, "/")
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
                original = self._original(entry.path)
                if original is None:
                    continue
                if os.path.isdir(entry.path):
                    # Skip virtual environments and .git: they are large, and the program does not
                    # write there.
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

    def ready_to_link(self, path: str, follow: bool) -> None:
        """Prepare a second name for a file. Both names must be of one copy: two names of our link
        would become two files at the first write."""
        here = self._walk(path, follow)
        if here is None or not self._is_ours(here):
            return
        if os.path.isdir(here):
            self._expand(here)
        elif os.path.isfile(here):
            # Without room for a copy, both names can still be read.
            with contextlib.suppress(Full):
                self._copy(here)

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
        return self._original(path) is not None

    def _original(self, path: str, folder: Optional[int] = None) -> Optional[str]:
        """What our link leads to; None if it is not ours."""
        try:
            told = os.stat(path, dir_fd=folder, follow_symlinks=False)
            original = self.links.get((told.st_dev, told.st_ino))
            # A link that the program makes after it removed ours may have its inode.
            if original is None or os.readlink(path, dir_fd=folder) != original:
                return None
        except OSError:
            return None
        return original

    @contextlib.contextmanager
    def _entry(self, here: str) -> Iterator[tuple[int, str]]:
        """The folder and the name of a path in the mirror. Raises OSError if the program has put a
        link on the way."""
        inside, _, name = here[len(self.folder) :].rpartition("/")
        with folders.beneath(self.root, inside) as folder:
            yield folder, name

    def _link(self, original: str, name: str, folder: int) -> None:
        os.symlink(original, name, dir_fd=folder)
        told = os.stat(name, dir_fd=folder, follow_symlinks=False)
        self.links[told.st_dev, told.st_ino] = original

    def _forget(self, name: str, folder: int) -> None:
        told = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if told.st_nlink == 1:
            self.links.pop((told.st_dev, told.st_ino), None)

    def _fill(self, folder: int, original: str) -> None:
        """Link the entries of the folder `original` into the folder of the descriptor."""
        with os.scandir(original) as entries:
            for entry in entries:
                if entry.path == self.hidden:
                    continue
                if entry.path in self.writable:
                    os.symlink(entry.path, entry.name, dir_fd=folder)
                elif entry.is_symlink():
                    target = os.readlink(entry.path)
                    # The user's own links must lead to files in the mirror.
                    shown = self.of(target) if target.startswith("/") else target
                    os.symlink(shown, entry.name, dir_fd=folder)
                else:
                    self._link(entry.path, entry.name, folder)

    def _expand(self, here: str) -> bool:
        """Replace a link to a folder by a folder. Returns False if it cannot be read."""
        part = secrets.token_hex(16)
        try:
            with self._entry(here) as (folder, name):
                original = self._original(name, folder)
                if original is None:
                    return False
                mode = stat.S_IMODE(os.stat(original).st_mode)
                os.mkdir(part, 0o700, dir_fd=self.parts)
                with folders.beneath(self.parts, part) as made:
                    self._fill(made, original)
                    # Not fchmod, which needs more than a path's descriptor.
                    os.chmod(f"/proc/self/fd/{made}", mode | stat.S_IRWXU)
                # Atomic except for the moment after unlink: a folder cannot be renamed over a link.
                self._forget(name, folder)
                os.unlink(name, dir_fd=folder)
                os.rename(part, name, src_dir_fd=self.parts, dst_dir_fd=folder)
        except OSError:
            folders.remove_in(self.parts, part)
            return False
        return True

    def _copy(self, here: str, length: Optional[int] = None) -> bool:
        """Replace a link to a file by a copy of the file's first `length` bytes (None: all). Raises
        Full."""
        part = secrets.token_hex(16)
        try:
            with self._entry(here) as (folder, name):
                original = self._original(name, folder)
                if original is None:
                    return False
                self._write(part, original, length)
                self._forget(name, folder)
                os.rename(part, name, src_dir_fd=self.parts, dst_dir_fd=folder)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(part, dir_fd=self.parts)
            return False
        return True

    def _write(self, part: str, original: str, length: Optional[int]) -> None:
        """Write the first `length` bytes of a file, with its mode and times, to a new one of our
        own."""

        def new(name: str, flags: int) -> int:
            return os.open(name, flags | os.O_NOFOLLOW, 0o600, dir_fd=self.parts)

        def at_once(name: str, flags: int) -> int:
            # What has become a pipe meanwhile would keep us waiting.
            return os.open(name, flags | os.O_NONBLOCK)

        with open(original, "rb", opener=at_once) as source:
            told = os.fstat(source.fileno())
            if not stat.S_ISREG(told.st_mode):
                raise OSError(f"{original} is no file any more")
            size = told.st_size if length is None else length
            if size > self.room:
                raise Full(original)
            with open(part, "xb", opener=new) as target:
                if size:
                    shutil.copyfileobj(source, target, 1 << 20)
                target.flush()
                os.fchmod(target.fileno(), stat.S_IMODE(told.st_mode))
                os.utime(target.fileno(), ns=(told.st_atime_ns, told.st_mtime_ns))
