"""The guard: handles the system calls that a program under Landlock may not make by itself. It
copies files that the program is about to write to, and refuses what would reach outside the run's
folder, noting the name.

The guard does not protect against a malicious program, since the memory that it reads from the
program may change before the kernel reads it. Landlock does. The guard makes Landlock usable, and
finds the names for the error messages.
"""

from __future__ import annotations

import errno
import json
import os
from typing import Optional

from . import filter, kernel
from .addresses import Network
from .filter import Kind, Named
from .links import Full, Mirror

_AT_FDCWD = -100
_EMPTY_PATH = b""


class Refusals:
    """The list of refusals, in a file that callers read (`box`), one line of JSON each."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.known: set[tuple[str, str]] = set()

    def add(self, kind: str, name: str) -> None:
        if (kind, name) in self.known or len(self.known) >= 1000:
            return
        self.known.add((kind, name))
        with open(self.path, "a") as file:
            print(json.dumps({"kind": kind, "name": name}), file=file)


class Guard:
    def __init__(self, mirror: Mirror, writable: list[str], refusals: Refusals) -> None:
        self.mirror = mirror
        self.writable = [os.path.realpath(path) for path in writable]
        self.refusals = refusals
        # Before it, Landlock lets a file be emptied that it does not let be written to.
        self.lets_truncate = kernel.landlock_version() < 3
        self.kinds = filter.kinds()
        self.network = Network(self._may_connect, refusals.add)

    def answer(self, call: kernel.Call) -> None:
        try:
            if call.number in self.network.calls:
                self.network.answer(call)
                return
            error = self._of_file(call)
        except OSError as unknown:
            # The process is gone, or its memory cannot be read. Landlock decides if it can.
            error = (unknown.errno or errno.EACCES) if self._is_last(call) else 0
            error = {errno.EIO: errno.EFAULT, errno.ENOENT: errno.EBADF}.get(error, error)
        if error:
            call.refuse(error)
        else:
            call.go_on()

    def _is_last(self, call: kernel.Call) -> bool:
        """Whether nothing but the guard refuses the call."""
        if call.number in self.network.calls:
            return True
        kind = self.kinds[call.number]
        return _is_change(kind) or (self.lets_truncate and _truncates(call, kind))

    # Files.

    def _of_file(self, call: kernel.Call) -> int:
        """The error number with which to refuse a call on files; 0 to let it go on."""
        kind = self.kinds[call.number]
        paths = [self._path(call, named) for named in kind.names]
        truncates = _truncates(call, kind)
        follows = (
            call.number == filter.number(filter.LINK_AT) and call.arguments[4] & filter.FOLLOWS
        )
        try:
            for place, path in enumerate(paths):
                if path is None or not self.mirror.has(path):
                    continue
                if kind.what == "link" and place == 0:
                    self.mirror.ready_to_link(path, bool(follows))
                else:
                    self._prepare(kind, path, truncates)
        except Full as full:
            self.refusals.add("space", str(full))
            return errno.ENOSPC
        # The first error counts: a call with two names moves or links the first.
        error = 0
        for path in paths:
            if path is not None:
                error = error or self._outside(kind, path, truncates)
        return error

    def _prepare(self, kind: Kind, path: str, truncates: bool) -> None:
        if kind.what in ("open", "create", "change"):
            self.mirror.ready_to_write(path, truncates)
        elif kind.what == "truncate":
            # The new length may keep part of the content.
            self.mirror.ready_to_write(path)
        else:
            self.mirror.ready_entry(path)

    def _outside(self, kind: Kind, path: str, truncates: bool) -> int:
        """Note what Landlock will refuse; refuse what Landlock does not cover."""
        of_entry = kind.what in ("entry", "move", "link", "change link")
        real = (
            os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
            if of_entry
            else os.path.realpath(path)
        )
        if self._is_writable(real):
            return 0
        is_change = _is_change(kind)
        exists = os.path.lexists(real)
        if exists and not is_change and not of_entry:
            could = os.access(real, os.W_OK) and not os.path.isdir(real)
        elif exists and is_change:
            could = os.geteuid() in (0, os.lstat(real).st_uid)
        else:
            could = os.access(os.path.dirname(real), os.W_OK)
        if could:
            # Otherwise the call would fail without the sandbox too.
            self.refusals.add("write", real)
        return errno.EACCES if is_change or (truncates and self.lets_truncate) else 0

    def _is_writable(self, real: str) -> bool:
        if any(real == path or real.startswith(path + "/") for path in self.writable):
            return True
        return real.startswith(("/dev/", "/proc/")) or not real.startswith("/")

    def _path(self, call: kernel.Call, named: Named) -> Optional[str]:
        """The absolute path of the file in the call; None if the file has no name."""
        task = f"/proc/{call.thread}"
        text = b""
        if named.path is not None:
            address = call.arguments[named.path]
            text = call.text(address) if address else _EMPTY_PATH
            if not address and named.folder is None:
                return None
        if text.startswith(b"/"):
            return call.seen(os.fsdecode(text))
        folder = -1 if named.folder is None else _signed(call.arguments[named.folder])
        at = f"{task}/cwd" if folder in (-1, _AT_FDCWD) else f"{task}/fd/{folder}"
        base = os.readlink(at)
        if not base.startswith("/"):
            # A pipe, a socket or memory has no name.
            return None
        return os.path.join(base, os.fsdecode(text)) if text else base

    def _may_connect(self, real: str) -> bool:
        """Whether the program may connect to the socket of this name: only the run's own."""
        return any(real == path or real.startswith(path + "/") for path in self.writable)


def _is_change(kind: Kind) -> bool:
    """Whether the call changes what Landlock does not cover."""
    return kind.what in ("change", "change link")


def _truncates(call: kernel.Call, kind: Kind) -> bool:
    if kind.flags is not None:
        return bool(call.arguments[kind.flags] & filter.TRUNCATES)
    return kind.what in ("create", "truncate")


def _signed(argument: int) -> int:
    low = argument & 0xFFFFFFFF
    return low - (1 << 32) if low >= 1 << 31 else low
