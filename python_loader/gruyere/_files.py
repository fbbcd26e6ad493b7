"""Files that readers see whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO


@contextlib.contextmanager
def replacing(file: Path, prefix: str) -> Iterator[IO[bytes]]:
    """A new, private file whose name begins with `prefix`, beside `file`, whose place it takes at
    the end. If that or what is done inside fails, it is removed, and `file` stays as it is."""
    descriptor, name = tempfile.mkstemp(prefix=prefix, dir=file.parent)
    try:
        with os.fdopen(descriptor, "wb") as unfinished:
            yield unfinished
        os.replace(name, file)
    except BaseException:
        os.unlink(name)
        raise
