"""Landlock: this process and its children can change files only in the allowed folders. Needs Linux
5.13 and no privilege. What Landlock does not cover is left to `filter` and `guard`."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from . import filter, kernel

_SHARED_MEMORY = "/dev/shm"


def why_not() -> str:
    """Why Landlock is not available; empty if it is."""
    if not filter.supported():
        return f"not supported on {kernel.machine()}"
    if not kernel.landlock_version():
        return "this kernel has no Landlock, or a container forbids it"
    return ""


def restrict(writable: list[str], network: bool) -> None:
    """Restrict writes to `writable` and to devices, and, without `network`, connections to abstract
    sockets to those of the program (from version 6 on). Call after `kernel.forbid_new_privileges`.
    Raises OSError if the kernel refuses."""
    version = kernel.landlock_version()
    scoped = 0 if network or version < 6 else kernel.SCOPE_ABSTRACT
    rules = kernel.Ruleset(kernel.landlock_rights(version), scoped)
    for path in (*writable, *devices()):
        rules.allow(path)
    if os.path.isdir(_SHARED_MEMORY):
        # The guard tells what is the run's there (`shared`), and makes nothing but these.
        rules.allow(_SHARED_MEMORY, plain=True)
    rules.restrict_self()
    os.close(rules.handle)


def devices() -> Iterator[str]:
    """Paths that a program writes to and that store nothing: terminals, /dev/null, GPUs, and a
    process's own files in /proc. No disks."""
    yield from (path for path in ("/dev/pts", "/proc/self") if os.path.isdir(path))
    for folder in ("/dev", "/dev/dri", "/dev/nvidia-caps"):
        try:
            entries = list(os.scandir(folder))
        except OSError:
            continue
        for entry in entries:
            try:
                # A link of /dev/fd or /dev/stdout leads to an open file.
                if stat.S_ISCHR(os.stat(entry.path).st_mode):
                    yield entry.path
            except OSError:
                continue
