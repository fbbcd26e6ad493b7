"""The machine's shared memory, /dev/shm, for a program under Landlock, which has no namespace and
so none of its own: it may change what the run has made there, and nothing else. What it leaves
there is removed at the run's end.

We make the files and folders there in the program's place, so that we know which are the run's, by
their inodes: these stay the same when the program links or renames them.
"""

from __future__ import annotations

import errno
import os

from . import filter, folders, kernel
from .filter import Kind

_PLACE = "/dev/shm"


class Shared:
    def __init__(self) -> None:
        self.folder = os.path.realpath(_PLACE)
        self.root = -1
        if os.path.isdir(self.folder):
            self.root = os.open(self.folder, os.O_PATH | os.O_DIRECTORY)
        self.made: set[tuple[int, int]] = set()

    def has(self, real: str) -> bool:
        return self.root >= 0 and (real == self.folder or real.startswith(self.folder + "/"))

    def refused(self, kind: Kind, real: str, place: int) -> int:
        """The error number with which to refuse a change of an entry, the name number `place` of
        the call; 0 to let it go on."""
        try:
            told = os.lstat(real)
        except OSError:
            # The kernel refuses what needs an entry. It would make these itself.
            return errno.EACCES if kind.what == "make" else 0
        is_new = kind.what in ("make", "make folder") or (kind.what == "link" and place == 1)
        # What is new cannot have this name: the kernel says so.
        return 0 if is_new or (told.st_dev, told.st_ino) in self.made else errno.EACCES

    def make(self, call: kernel.Call, kind: Kind, real: str) -> bool:
        """Make the file or folder that the call makes, and answer the call. Returns False if it
        makes none. Raises OSError if it cannot be made."""
        if kind.flags is not None and _is_nameless(call.arguments[kind.flags]):
            # It could get a name later, which we would not know. As on a file system without such
            # files, after which Python and others make one with a name.
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        if os.path.lexists(real) or kind.mode is None:
            return False
        mode = call.arguments[kind.mode] & 0o7777 & ~_mask(call)
        inside, _, name = real[len(self.folder) :].rpartition("/")
        if kind.what == "make folder":
            with folders.beneath(self.root, inside) as folder:
                os.mkdir(name, 0o700, dir_fd=folder)
                # Our own mask is not the program's.
                with folders.beneath(folder, name) as made:
                    os.chmod(f"/proc/self/fd/{made}", mode)
                    self._note(made)
            call.done()
            return True
        flags = filter.CREATES
        if kind.flags is not None:
            flags = call.arguments[kind.flags] & 0x7FFFFFFF
        if not flags & os.O_CREAT:
            return False
        with folders.beneath(self.root, inside) as folder:
            new = flags | os.O_EXCL | os.O_NOFOLLOW
            handle = os.open(name, new, 0o600, dir_fd=folder)
            try:
                os.fchmod(handle, mode)
                self._note(handle)
                call.give(handle, bool(flags & os.O_CLOEXEC))
            except OSError:
                # The program does not know of it.
                os.unlink(name, dir_fd=folder)
                raise
            finally:
                os.close(handle)
        return True

    def _note(self, handle: int) -> None:
        told = os.fstat(handle)
        self.made.add((told.st_dev, told.st_ino))

    def clear(self) -> None:
        """Remove what the run has left."""
        if not self.made:
            return
        for _, inner, names, folder in os.fwalk(self.folder):
            for name in (*inner, *names):
                try:
                    told = os.stat(name, dir_fd=folder, follow_symlinks=False)
                except OSError:
                    continue
                if (told.st_dev, told.st_ino) in self.made:
                    folders.remove_in(folder, name)
                    if name in inner:
                        inner.remove(name)


def _is_nameless(flags: int) -> bool:
    return flags & os.O_TMPFILE == os.O_TMPFILE


def _mask(call: kernel.Call) -> int:
    """The program's umask."""
    with open(f"/proc/{call.thread}/status") as file:
        for line in file:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return 0o077
