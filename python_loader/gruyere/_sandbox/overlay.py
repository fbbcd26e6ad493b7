"""Namespaces: an overlay over each tree that could be written to, everything else read-only, and a
network that has only loopback. Needs Linux 5.12 and unprivileged user namespaces."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from typing import Iterator, Optional

from . import kernel
from .mounts import mounts

# Mounted anew for the program, so that its shared memory is private.
_SHARED_MEMORY = "/dev/shm"
# Trees of the kernel, over which no overlay is mounted: a device does not work through one.
_OF_KERNEL = ("/dev", "/proc", "/sys")
# The limit on overlays, and on the entries of a folder that is made anew. More overlays would mean
# that the list of mounts is wrong.
_MOST = 4000
# The most bytes of files that are copied to the working folder if it is made anew, and to another
# folder: at most these parts of what the run may write, and less for others, which may be /tmp.
_COPIED, _PART, _LESS = 512 << 20, 8, 8


def identities() -> Optional[tuple[str, str]]:
    """The user and group maps for a child: all our ids, if we may map them; None if the child can
    map only its own."""
    if os.geteuid() != 0:
        return None

    def same(kind: str) -> str:
        with open(f"/proc/self/{kind}") as file:
            lines = [line.split() for line in file]
        return "".join(f"{inside} {inside} {count}\n" for inside, _, count in lines)

    return same("uid_map"), same("gid_map")


def write_map(pid: int, kind: str, text: str) -> None:
    # In a single write: the kernel accepts a map only once.
    handle = os.open(f"/proc/{pid}/{kind}", os.O_WRONLY)
    try:
        os.write(handle, text.encode())
    finally:
        os.close(handle)


def leave(network: bool) -> None:
    """Move this process into new namespaces. The maps are not written yet."""
    flags = kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS
    kernel.unshare(flags if network else flags | kernel.CLONE_NEWNET)


def map_self(uid: int, gid: int) -> None:
    """Write the maps that a process may write for itself: its own user and group."""
    write_map(os.getpid(), "setgroups", "deny")
    write_map(os.getpid(), "uid_map", f"{uid} {uid} 1\n")
    write_map(os.getpid(), "gid_map", f"{gid} {gid} 1\n")


class Overlay:
    """The overlays over this process's files, once it has its own mount namespace.

    At first all mounts that there are become read-only, whatever they are called and whether they
    can be reached. So what no overlay can be mounted over cannot be changed.
    """

    def __init__(
        self, layers: str, run: str, shown: str, room: int, cwd: str, homes: list[str]
    ) -> None:
        """`layers`: an empty folder for what is written, in the folder `run` of this run, which is
        in the folder `shown`. The files of `shown` and `run` are not behind an overlay: a lock on
        one would be another lock there. `room`: bytes that the run may write. `cwd`: the program's
        working folder. `homes`: folders on the way to which the overlays' folders are created at
        once (`_lead`)."""
        self.layers = layers
        self.run = run
        self.shown = shown
        self.room = min(_COPIED, room // _PART)
        self.cwd = os.path.realpath(cwd)
        self.homes = homes
        self.count = self.tried = 0
        self.points = [mount.path for mount in mounts()]
        self.near: list[str] = []
        self.renewed: set[str] = set()
        self.scratch = ""
        self.dead = ""

    def cover(self, writable: list[str], network: bool, likely: list[str]) -> None:
        """Mount the overlays. `writable`: paths without an overlay. `likely`: folders in which the
        program probably writes. Raises OSError if the kernel refuses."""
        kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
        self.near = [os.path.realpath(folder) for folder in likely]
        if not network:
            kernel.raise_loopback()
        self.renewed = self._to_renew()
        layers = kernel.clone_mount(self.layers)
        kept = [(path, kernel.clone_mount(path)) for path in writable]
        kernel.change_mount("/", add=kernel.READ_ONLY, below=True)
        shown = kernel.clone_mount(self.shown)
        # Only an attached mount can hold the files of an overlay. As a descriptor it stays within
        # reach when an overlay covers the folders above it.
        kernel.attach_mount(layers, self.layers)
        self.scratch = f"/proc/self/fd/{layers}"
        if not network:
            self.dead = f"{self.scratch}/socket"
            os.mknod(self.dead, stat.S_IFSOCK | 0o600)
            self._close_sockets("/dev", "/dev")
        for name in self._folders("/", "/"):
            if f"/{name}" not in _OF_KERNEL:
                with _opened(f"/{name}") as source:
                    self._cover(f"/{name}", source)
        if not self.count:
            raise OSError("no overlay can be mounted here")
        kernel.attach_mount(shown, self.shown)
        for name in _listed(self.shown):
            path = f"{self.shown}/{name}"
            if path != self.run:
                with _opened(path) as source:
                    self._cover(path, source)
        if os.path.isdir(_SHARED_MEMORY):
            kernel.mount("tmpfs", _SHARED_MEMORY, "tmpfs", options="mode=1777")
        for path, clone in kept:
            if path.startswith(_SHARED_MEMORY + "/"):
                _make_place(path, os.fstat(clone))
            kernel.attach_mount(clone, path)
        # Nothing to see: the same is where the overlays are.
        kernel.mount("tmpfs", self.layers, "tmpfs", kernel.MS_RDONLY)
        _close_disks()
        _open_processes()
        for handle in (layers, shown, *(clone for _, clone in kept)):
            os.close(handle)

    def _has_mounts_below(self, path: str) -> bool:
        return any(point.startswith(path + "/") for point in self.points)

    def _to_renew(self) -> set[str]:
        """The folders above and below those in which the program probably writes that the user may
        write to, and over which no overlay can be mounted."""
        above = {above for point in self.points for above in _above(point)}
        return {path for path in above if self._is_near(path) and os.access(path, os.W_OK)}

    def _is_near(self, path: str) -> bool:
        return any(
            f"{path}/".startswith(f"{one}/") or one.startswith(f"{path}/") for one in self.near
        )

    def _cover(self, path: str, source: Optional[int], is_there: bool = True) -> None:
        """Let the program write to the folder `path`, whose files are at `source`: mount an overlay
        over it, or over the folders in it if there are mounts below it. `is_there`: whether `path`
        shows these files now."""
        if source is None or self._overlay(path, source):
            return
        seen = f"/proc/self/fd/{source}"
        if path in self.renewed:
            names = self._renew(path, source)
            if names is not None:
                for name in names:
                    with _opened(f"{seen}/{name}") as inner:
                        self._cover(f"{path}/{name}", inner, is_there=False)
                return
        if not is_there:
            # As read-only as what it is a copy of.
            kernel.mount(seen, path, flags=kernel.MS_BIND | kernel.MS_REC)
        if self.dead:
            self._close_sockets(path, seen)
        if self._has_mounts_below(path):
            for name in self._folders(path, seen):
                with _opened(f"{seen}/{name}") as inner:
                    self._cover(f"{path}/{name}", inner)

    def _folders(self, path: str, seen: str) -> list[str]:
        """The names of the folders in the folder `path`, whose files are at `seen`: of those on the
        way to a mount or a home at least, if it may be entered but not listed."""
        names = set(_listed(seen))
        start = path.rstrip("/") + "/"
        for known in (*self.points, *self.near):
            if known.startswith(start):
                names.add(known[len(start) :].partition("/")[0])
        names.discard("")
        return sorted(names)

    def _close_sockets(self, path: str, seen: str) -> None:
        """Let nobody use the socket files and named pipes in a folder without an overlay. That it
        is read-only keeps nobody from them."""
        try:
            with os.scandir(seen) as entries:
                described = list(map(_described, entries))
        except OSError:
            return
        for entry, told in described:
            # It may have gone meanwhile.
            with contextlib.suppress(FileNotFoundError):
                if _leads_out(told.st_mode):
                    kernel.mount(self.dead, f"{path}/{entry.name}", flags=kernel.MS_BIND)

    def _layer(self, told: os.stat_result) -> str:
        """An empty folder like the one that is described."""
        layer = f"{self.scratch}/{self.tried}"
        self.tried += 1
        os.makedirs(f"{layer}/files")
        os.mkdir(f"{layer}/work")
        _make_alike(f"{layer}/files", told)
        return layer

    def _overlay(self, path: str, source: int) -> bool:
        if self.count >= _MOST:
            raise OSError(f"more than {_MOST} overlays would be needed")
        try:
            # The mount's root has the upper folder's owner and mode.
            layer = self._layer(os.fstat(source))
        except OSError:
            # The folder is of a file system that does not answer.
            return False
        upper, work = f"{layer}/files", f"{layer}/work"
        self._lead(path, source, upper)
        options = f"userxattr,lowerdir=/proc/self/fd/{source},upperdir={upper},workdir={work}"
        try:
            kernel.mount("overlay", path, "overlay", options=options)
        except OSError:
            return False
        self.count += 1
        return True

    def _lead(self, path: str, source: int, upper: str) -> None:
        """Create the folders on the way to the homes. Otherwise the overlay would copy them up at
        the first write, which fails if one of them belongs to a user that is not mapped."""
        for home in self.homes:
            real = os.path.realpath(home)
            here, there = f"/proc/self/fd/{source}", upper
            inside = os.path.relpath(real, path)
            if inside == "." or inside.startswith(".."):
                continue
            for part in inside.split("/"):
                here, there = f"{here}/{part}", f"{there}/{part}"
                try:
                    mode = stat.S_IMODE(os.stat(here).st_mode)
                    os.mkdir(there)
                    os.chmod(there, mode)
                except FileExistsError:
                    # On the way to another home.
                    continue
                except OSError:
                    # The home has been removed, or cannot be reached.
                    break

    def _renew(self, path: str, source: int) -> Optional[list[str]]:
        """Mount a new folder over `path`, with copies of the files in it; those that are too large
        to copy are shown read-only. Returns the names of its folders, which are empty in it; None
        if it has too many entries.

        The kernel mounts no overlay over a folder with mounts below it, since the program could see
        there what these mounts hide.
        """
        try:
            with os.scandir(f"/proc/self/fd/{source}") as listed:
                entries = list(listed)
            files = self._layer(os.fstat(source)) + "/files"
        except OSError:
            return None
        if len(entries) > _MOST:
            return None
        folders, left = [], []
        room = self.room if path == self.cwd else self.room // _LESS
        # The smallest first, so that most are copied.
        for entry, told in sorted(map(_described, entries), key=lambda one: one[1].st_size):
            there = f"{files}/{entry.name}"
            if stat.S_ISDIR(told.st_mode):
                os.mkdir(there)
                folders.append(entry.name)
            elif stat.S_ISLNK(told.st_mode):
                with contextlib.suppress(FileNotFoundError):
                    os.symlink(os.readlink(entry.path), there)
            elif _leads_out(told.st_mode):
                # As behind an overlay: the one outside cannot be reached.
                os.mknod(there, told.st_mode)
            elif told.st_size <= room and _copied(entry.path, there, told):
                room -= told.st_size
            else:
                left.append(entry)
        kernel.mount(files, path, flags=kernel.MS_BIND)
        for entry in left:
            there = f"{path}/{entry.name}"
            with open(there, "w"):
                pass
            try:
                kernel.mount(entry.path, there, flags=kernel.MS_BIND)
            except OSError:
                # It has been removed meanwhile, or cannot be reached.
                os.unlink(there)
        return folders


def _above(path: str) -> Iterator[str]:
    """The folders that a path is in, but for the root."""
    path = os.path.dirname(path)
    while path != "/":
        yield path
        path = os.path.dirname(path)


@contextlib.contextmanager
def _opened(path: str) -> Iterator[Optional[int]]:
    """The folder as a descriptor; None if it has been removed since it was listed (another run's
    folder, beside ours) or cannot be reached."""
    try:
        handle = os.open(path, os.O_PATH | os.O_NOFOLLOW)
    except OSError:
        handle = None
    try:
        yield handle
    finally:
        if handle is not None:
            os.close(handle)


def _listed(path: str) -> list[str]:
    """The names of the folders in a folder; empty if it cannot be listed."""
    try:
        with os.scandir(path) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []


def _leads_out(mode: int) -> bool:
    """Whether it is a socket file or a named pipe, behind which there may be other programs."""
    return stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode)


def _make_place(path: str, told: os.stat_result) -> None:
    """Make an empty file or folder over which a mount of what is described can be attached."""
    is_folder = stat.S_ISDIR(told.st_mode)
    os.makedirs(path if is_folder else os.path.dirname(path), exist_ok=True)
    if not is_folder:
        with open(path, "a"):
            pass


def _described(entry: os.DirEntry[str]) -> tuple[os.DirEntry[str], os.stat_result]:
    try:
        return entry, entry.stat(follow_symlinks=False)
    except OSError:
        # A file system that does not answer is mounted there, as a folder.
        kind = stat.S_IFDIR if entry.is_dir(follow_symlinks=False) else stat.S_IFREG
        return entry, os.stat_result((kind, *[0] * 9))


def _make_alike(path: str, told: os.stat_result) -> None:
    try:
        os.chown(path, told.st_uid, told.st_gid)
    except OSError:
        # It is another user's. Only what is in it matters.
        pass
    os.chmod(path, told.st_mode & 0o7777)


def _copied(path: str, there: str, told: os.stat_result) -> bool:
    """Copy a regular file; false if it is none, or cannot be read."""
    if not stat.S_ISREG(told.st_mode):
        return False
    try:
        shutil.copyfile(path, there)
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(there)
        return False
    _make_alike(there, told)
    os.utime(there, ns=(told.st_atime_ns, told.st_mtime_ns))
    return True


def _close_disks() -> None:
    """Keep root from writing to disks past their file systems: a mount that is read-only does not
    keep anybody from writing to a device."""
    for where, _, names in os.walk("/dev"):
        for name in names:
            path = f"{where}/{name}"
            try:
                is_open = stat.S_ISBLK(os.lstat(path).st_mode) and os.access(path, os.W_OK)
            except OSError:
                continue
            if is_open:
                kernel.mount(path, path, flags=kernel.MS_BIND)
                kernel.change_mount(path, add=kernel.NO_DEVICES)


def _open_processes() -> None:
    """Let the program write to its /proc/self, but to nothing that is not a process's."""
    with os.scandir("/proc") as entries:
        others = [
            entry.path
            for entry in entries
            if not entry.name.isdecimal()
            and not entry.is_symlink()
            and (entry.is_dir() or entry.stat().st_mode & 0o222)
        ]
    for path in others:
        # Read-only, as /proc is until then.
        kernel.mount(path, path, flags=kernel.MS_BIND | kernel.MS_REC)
    # In a container /proc may have been read-only before, which nobody may change in here.
    with contextlib.suppress(PermissionError):
        kernel.change_mount("/proc", remove=kernel.READ_ONLY)
