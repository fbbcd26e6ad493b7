"""The records of a program in the sandbox, shown in the folder where `gruyere top` and `post` look.

The program keeps them in a folder of their own, so it sees and changes nothing else there: the
usual place is `/dev/shm`, where other programs have their shared memory. Each record has a second
name in the folder, a hard link, from soon after it is made until it is removed.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from ._errors import say
from ._sandbox import owned

# The records' names (`is_record_name` in crates/record/src/read/sweep.rs).
_RECORD = re.compile(r"gruyere-.*\.record", re.DOTALL)
# Seconds between two looks at the program's records.
_LOOKS = 0.1


class Records:
    """The context of a run, which gives the program's folder."""

    def __init__(self, shown: str) -> None:
        """`shown`: the folder in which the records are to be seen."""
        self.shown = shown
        self._linked: dict[str, tuple[int, int]] = {}
        self._has_said = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> str:
        owned.sweep([self.shown])
        self.folder = Path(tempfile.mkdtemp(prefix="gruyere-stand-in-", dir=self.shown)).resolve()
        owned.own(self.folder)
        self._thread.start()
        return str(self.folder)

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._show()
        owned.release(self.folder)

    def _follow(self) -> None:
        while not self._ended.wait(_LOOKS):
            self._show()

    def _show(self) -> None:
        """Link the records that are new, and unlink those that the program has removed."""
        found = {}
        # The program may remove any of it meanwhile.
        with suppress(OSError), os.scandir(self.folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    told = entry.stat(follow_symlinks=False)
                    if _RECORD.fullmatch(entry.name) and stat.S_ISREG(told.st_mode):
                        found[entry.name] = told.st_dev, told.st_ino
        for name, known in list(self._linked.items()):
            if found.get(name) != known:
                self._unlink(name)
        for name, identity in found.items():
            if name not in self._linked:
                self._link(name, identity)

    def _link(self, name: str, identity: tuple[int, int]) -> None:
        try:
            os.link(self.folder / name, Path(self.shown, name), follow_symlinks=False)
            self._linked[name] = identity
        except FileNotFoundError:
            # It has been removed meanwhile.
            return
        except OSError as error:
            if not self._has_said:
                self._has_said = True
                say(
                    f"gruyere: --stand-in: {self.shown} does not show the program's record "
                    f"({error.strerror}): name a folder in memory with GRUYERE_RECORD_DIR"
                )

    def _unlink(self, name: str) -> None:
        path = Path(self.shown, name)
        with suppress(OSError):
            told = path.lstat()
            if (told.st_dev, told.st_ino) == self._linked[name]:
                path.unlink()
        del self._linked[name]
