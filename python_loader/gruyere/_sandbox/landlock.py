"""Landlock: this process and its children change no file but in the folders that are allowed. Needs
Linux 5.13, and no privilege. What it knows nothing of is the guard's (`filter`, `guard`)."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from . import filter, kernel


def why_not() -> str:
    """What is missing; empty where nothing is."""
    if not filter.supported():
        return f"not known on {kernel.machine()}"
    if not kernel.landlock_version():
        return "this kernel has no Landlock, or a container forbids it"
    return ""


def restrict(writable: list[str]) -> None:
    """Raises OSError where the kernel won't. After `kernel.forbid_new_privileges`."""
    rules = kernel.Ruleset(kernel.landlock_rights(kernel.landlock_version()))
    for path in (*writable, *devices()):
        rules.allow(path)
    rules.restrict_self()
    os.close(rules.handle)


def devices() -> Iterator[str]:
    """What is written to and holds nothing: terminals, /dev/null, a GPU; memory that processes
    share; what a process says of itself. No disk."""
    yield from (path for path in ("/dev/shm", "/dev/mqueue", "/dev/pts", "/proc/self")
                if os.path.isdir(path))  # fmt: skip
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
