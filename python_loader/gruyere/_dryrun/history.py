"""Answers that are kept for `gruyere report`, a file each."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

# The suffix that `gruyere report` looks for (crates/cli/src/report/dry.rs).
_SUFFIX = ".dryrun.json"


def prepare(folder: str) -> None:
    """Makes the folder, where it is not there. Raises OSError where it cannot be written to."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def keep(folder: str, run: dict[str, Any], text: str) -> Path:
    """Writes an answer. Who reads the folder meanwhile sees all of it or nothing."""
    seconds = run["started_nanoseconds"] // 1_000_000_000
    file = Path(folder, f"{run['name']}.{seconds}-{run['pid']}{_SUFFIX}")
    descriptor, name = tempfile.mkstemp(prefix=".keeping-", dir=folder)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as unfinished:
            unfinished.write(text)
        # Readers of the folder may read the file, as any other output of a program.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        os.rename(name, file)
    except BaseException:
        os.unlink(name)
        raise
    return file
