"""Answers stored for `gruyere report`, one file each."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from .._files import replacing

# The file name suffix that `gruyere report` looks for (crates/cli/src/report/dry.rs).
_SUFFIX = ".dryrun.json"


def prepare(folder: str) -> None:
    """Create the folder if it does not exist. Raises OSError if it is not writable."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def keep(folder: str, run: dict[str, Any], text: str) -> Path:
    """Write an answer atomically: readers of the folder see all of it or nothing."""
    seconds = run["started_nanoseconds"] // 1_000_000_000
    file = Path(folder, f"{run['name']}.{seconds}-{run['pid']}{_SUFFIX}")
    with replacing(file, ".keeping-") as unfinished:
        unfinished.write(text.encode())
        # Apply the umask, as for any other output file.
        mask = os.umask(0)
        os.umask(mask)
        os.fchmod(unfinished.fileno(), 0o666 & ~mask)
    return file
