"""Namespaces: an overlay over each tree that could be written to, everything else read-only, and a
network that has only loopback. Needs Linux 5.12 and unprivileged user namespaces."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Optional

from . import kernel

# Mounted anew for the program, so that its shared memory is private.
_SHARED_MEMORY = "/dev/shm"
# File systems of the kernel, which a program must write to (its terminal, devices, /proc/self).
_LEFT = ("/proc", "/dev")
# The limit on overlays. More would mean that the list of mounts is wrong.
_MOST = 4000


@dataclass(frozen=True)
class _Mount:
    path: str
    handle: int


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
    """The overlays over this process's files, once it has its own mount namespace."""

    def __init__(self, layers: str, hidden: str, homes: list[str]) -> None:
        """`layers`: an empty folder of the run for what is written. `hidden`: the folder that it is
        in, which must not be covered by an overlay. `homes`: folders in which the program is most
        likely to write."""
        self.layers = layers
        self.hidden = hidden
        self.homes = homes
        self.count = self.tried = 0
        self.mounts = _mounts()
        self.points = {mount.path for mount in self.mounts}

    def cover(self, writable: list[str], network: bool) -> None:
        """Mount the overlays. `writable`: paths without an overlay. Raises OSError if the kernel
        refuses."""
        kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
        if not network:
            kernel.raise_loopback()
        kept = [_Mount(path, os.open(path, os.O_PATH)) for path in writable]
        with os.scandir("/") as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.is_dir(follow_symlinks=False) and entry.path not in _LEFT:
                    self._cover(entry.path)
        if not self.count:
            raise OSError("no overlay can be mounted here")
        if os.path.isdir(_SHARED_MEMORY):
            kernel.mount("tmpfs", _SHARED_MEMORY, "tmpfs", options="mode=1777")
        for mount in kept:
            if mount.path.startswith(_SHARED_MEMORY + "/"):
                os.makedirs(mount.path, exist_ok=True)
            kernel.mount(f"/proc/self/fd/{mount.handle}", mount.path, flags=kernel.MS_BIND)
        for mount in self.mounts:
            if not any(mount.path == left or mount.path.startswith(left + "/") for left in _LEFT):
                kernel.make_read_only(mount.handle)
        for mount in (*self.mounts, *kept):
            os.close(mount.handle)

    def _cover(self, path: str) -> None:
        """Mount an overlay over a folder, or over the folders in it if there are mounts below it or
        our own folder is."""
        is_of_ours = path == self.hidden or self.hidden.startswith(path + "/")
        if not is_of_ours and self._mount(path):
            return
        below = path + "/"
        if is_of_ours or any(point.startswith(below) for point in self.points):
            try:
                entries = sorted(os.scandir(path), key=lambda entry: entry.name)
            except OSError:
                return
            for entry in entries:
                if entry.is_dir(follow_symlinks=False) and entry.path != self.layers:
                    self._cover(entry.path)

    def _mount(self, path: str) -> bool:
        if self.count >= _MOST:
            raise OSError(f"more than {_MOST} overlays would be needed")
        try:
            told = os.stat(path)
            lower = os.open(path, os.O_PATH)
        except FileNotFoundError:
            # It has been removed since it was listed: another run's folder, beside ours.
            return False
        try:
            return self._overlay(path, lower, told)
        finally:
            os.close(lower)

    def _overlay(self, path: str, lower: int, told: os.stat_result) -> bool:
        layer = f"{self.layers}/{self.tried}"
        self.tried += 1
        upper, work = f"{layer}/files", f"{layer}/work"
        os.makedirs(upper)
        os.mkdir(work)
        # The mount's root has the upper folder's owner and mode.
        try:
            os.chown(upper, told.st_uid, told.st_gid)
        except OSError:
            # It is another user's folder. Only its entries matter.
            pass
        os.chmod(upper, told.st_mode & 0o7777)
        self._lead(path, upper)
        options = f"userxattr,lowerdir=/proc/self/fd/{lower},upperdir={upper},workdir={work}"
        try:
            kernel.mount("overlay", path, "overlay", options=options)
        except OSError:
            return False
        self.count += 1
        return True

    def _lead(self, path: str, upper: str) -> None:
        """Create the folders on the way to the homes. Otherwise the overlay would copy them up at
        the first write, which fails if one of them belongs to a user that is not mapped."""
        for home in self.homes:
            real = os.path.realpath(home)
            here, there = path, upper
            inside = os.path.relpath(real, path)
            if inside == "." or inside.startswith(".."):
                continue
            for part in inside.split("/"):
                here, there = f"{here}/{part}", f"{there}/{part}"
                with contextlib.suppress(FileExistsError):
                    os.mkdir(there)
                    os.chmod(there, os.stat(here).st_mode & 0o7777)


def _mounts() -> list[_Mount]:
    """The current mounts, as open descriptors: a later mount over one of them is another mount."""
    found = []
    with open("/proc/self/mountinfo") as file:
        # proc_pid_mountinfo(5): the fifth field, with spaces and the like in octal.
        paths = [line.split()[4].encode().decode("unicode_escape") for line in file]
    for path in paths:
        try:
            found.append(_Mount(path, os.open(path, os.O_PATH)))
        except OSError:
            # Not accessible, so not writable.
            continue
    return found

