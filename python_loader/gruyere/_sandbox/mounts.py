"""The mounts that a process sees."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

# proc_pid_mountinfo(5): spaces and the like are written in octal.
_OCTAL = re.compile(rb"\\([0-7]{3})")


@dataclass(frozen=True)
class Mount:
    path: str
    kind: str
    """Its file system's name."""


def mounts(process: str = "self") -> list[Mount]:
    # As bytes: a path may have any bytes but zero.
    with open(f"/proc/{process}/mountinfo", "rb") as file:
        return [_mount(line) for line in file]


def _mount(line: bytes) -> Mount:
    before, _, after = line.partition(b" - ")
    path = _OCTAL.sub(lambda found: bytes([int(found[1], 8)]), before.split(b" ")[4])
    return Mount(os.fsdecode(path), os.fsdecode(after.split(b" ")[0]))
