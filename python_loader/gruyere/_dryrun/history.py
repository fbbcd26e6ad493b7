"""Answers stored for `gruyere report`, one file each."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

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
    descriptor, name = tempfile.mkstemp(prefix=".keeping-", dir=folder)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as unfinished:
            unfinished.write(text)
        # Apply the umask, as for any other output file: mkstemp makes the file private.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        os.rename(name, file)
    except BaseException:
        os.unlink(name)
        raise
    return file
