"""The guard: handles the system calls that a program under Landlock may not make by itself. It
copies files that the program is about to write to, and refuses what would reach outside the run's
folder, noting the name.

The guard does not protect against a malicious program, since the memory that it reads from the
program may change before the kernel reads it. Landlock does, and what the guard does in the
program's place (`addresses`, `shared`). The guard makes Landlock usable, and finds the names for
the error messages.
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
from .shared import Shared

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
        self.shared = Shared()
        self.network = Network(self._is_allowed, refusals.add)

    def answer(self, call: kernel.Call) -> None:
        try:
            if call.number in self.network.calls:
                self.network.answer(call)
                return
            error = self._of_file(call)
            if error is None:
                return
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

    def _of_file(self, call: kernel.Call) -> Optional[int]:
        """The error number with which to refuse a call on files; 0 to let it go on; None if it has
        been answered."""
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
        for place, path in enumerate(paths):
            if path is None:
                continue
            real = _real(kind, path)
            if self.shared.has(real) and not self._is_allowed(real):
                if self._makes_shared(call, kind, real):
                    return None
                found = self._of_shared(kind, real, place)
            else:
                found = self._outside(kind, real, truncates)
            error = error or found
        return error

    def _makes_shared(self, call: kernel.Call, kind: Kind, real: str) -> bool:
        try:
            return self.shared.make(call, kind, real)
        except OSError as error:
            call.refuse(error.errno or errno.EACCES)
            return True

    def _of_shared(self, kind: Kind, real: str, place: int) -> int:
        error = self.shared.refused(kind, real, place)
        if error:
            self.refusals.add("write", real)
        return error

    def _prepare(self, kind: Kind, path: str, truncates: bool) -> None:
        if kind.what in ("open", "create", "change"):
            self.mirror.ready_to_write(path, truncates)
        elif kind.what == "truncate":
            # The new length may keep part of the content.
            self.mirror.ready_to_write(path)
        else:
            self.mirror.ready_entry(path)

    def _outside(self, kind: Kind, real: str, truncates: bool) -> int:
        """Note what Landlock will refuse; refuse what Landlock does not cover."""
        is_change = _is_change(kind)
        if self._is_writable(real, is_change):
            return 0
        of_entry = kind.what in filter.OF_ENTRY
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

    def _is_writable(self, real: str, is_change: bool) -> bool:
        if self._is_allowed(real):
            return True
        # Devices may be written to, and stay as they are.
        of_kernel = real.startswith(("/dev/", "/proc/")) and not is_change
        return of_kernel or not real.startswith("/")

    def _is_allowed(self, real: str) -> bool:
        """Whether it is in a folder of the run, or that the user allows."""
        return any(real == path or real.startswith(path + "/") for path in self.writable)

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


def _real(kind: Kind, path: str) -> str:
    """What the call is about, with the links resolved that the kernel would follow."""
    if kind.what in filter.OF_ENTRY:
        folder, name = os.path.split(path.rstrip("/") or "/")
        return os.path.join(os.path.realpath(folder), name)
    return os.path.realpath(path)


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
