"""Finds out from an exception what the sandbox denied: a file that cannot be written to or
replaced, a folder that cannot be renamed, or a host that cannot be reached. The names of hosts,
which the kernel's errors lack, come from Python's audit events.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import sys
from typing import Any

from .._bench.measure import causes
from .mounts import mounts

# EOVERFLOW: an overlay cannot copy another user's group-writable file.
_DENIED = (errno.EPERM, errno.EACCES, errno.EOVERFLOW)
_UNREACHED = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN)
# Errors of HTTP clients and model hubs, by class name, because their modules are not imported here.
_OF_NETWORK = {
    "ConnectError", "ConnectionError", "ConnectTimeout", "URLError", "MaxRetryError",
    "NewConnectionError", "NameResolutionError", "ClientConnectorError", "EndpointConnectionError",
    "LocalEntryNotFoundError", "OfflineModeIsEnabled", "gaierror", "APIConnectionError",
    "CommError",
}  # fmt: skip


class Reach:
    def __init__(self, closed: list[str]) -> None:
        """`closed`: what the sandbox denies, from "files" and "network" (`Box.closed`)."""
        self.closed = closed
        self.hosts: list[str] = []

    def watch(self) -> None:
        """Install the audit hook, which cannot be removed. Call before the program runs."""
        sys.addaudithook(self._heard)

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        # Called for every audit event; most match none of these.
        if event == "socket.getaddrinfo" or event == "socket.gethostbyname":
            self._asked(arguments[0])
        elif event == "socket.connect" and isinstance(arguments[1], tuple):
            self._asked(arguments[1][0])

    def _asked(self, host: Any) -> None:
        name = host.decode(errors="replace") if isinstance(host, bytes) else host
        if isinstance(name, str) and name not in self.hosts and not _is_here(name):
            self.hosts.append(name)

    def behind(self, error: BaseException) -> list[dict[str, str]]:
        """The refusals behind an exception; empty if none is known."""
        found = []
        for cause in causes(error):
            names = {kind.__name__ for kind in type(cause).__mro__}
            number = getattr(cause, "errno", None)
            is_os = isinstance(cause, OSError)
            name = _file_of(cause) if "files" in self.closed else ""
            if name and number == errno.EXDEV and _is_one_disk(cause):
                names = _files_of(cause)
                folder = os.path.commonpath([os.path.dirname(one) for one in names])
                what = "rename" if os.path.isdir(name) else "move"
                found.append({"kind": what, "name": name, "to": names[-1], "folder": folder})
            elif number == errno.EBUSY and (name := name and _mounted(cause)):
                folder = os.path.dirname(name)
                found.append({"kind": "replace", "name": name, "folder": folder})
            elif name and (number == errno.EROFS or (number in _DENIED and _is_own(name))):
                found.append({"kind": "write", "name": name})
            elif "network" in self.closed and (
                names & _OF_NETWORK or (is_os and number in _UNREACHED)
            ):
                found.append({"kind": "network", "name": self._host(cause)})
        return found

    def _host(self, cause: BaseException) -> str:
        return self.hosts[-1] if self.hosts else f"another machine ({type(cause).__name__})"


def _files_of(error: BaseException) -> list[str]:
    """The files that an error names, both if it is of a rename."""
    names = (error.filename, error.filename2) if isinstance(error, OSError) else ()
    return [os.path.abspath(os.fsdecode(name)) for name in names if isinstance(name, (str, bytes))]


def _file_of(error: BaseException) -> str:
    """The first file that an error names; empty if it names none."""
    return next(iter(_files_of(error)), "")


def _outside() -> set[str]:
    """The mount points outside the sandbox, where this process's parent is (`enter`); empty if
    they cannot be read."""
    try:
        return {mount.path for mount in mounts(str(os.getppid()))}
    except OSError:
        return set()


def _is_one_disk(error: BaseException) -> bool:
    """Whether an error names two files that are in one mount outside the sandbox, so that only an
    overlay can be in the way from one to the other."""
    points = _outside()
    found = set()
    for name in _files_of(error):
        where = os.path.realpath(os.path.dirname(name))
        while where not in points and where != "/":
            where = os.path.dirname(where)
        found.add(where)
    return bool(points) and len(found) == 1


def _mounted(error: BaseException) -> str:
    """The file or folder of an error that is a mount point in the sandbox alone; empty if none
    is."""
    points = {mount.path for mount in mounts()} - _outside()
    return next((name for name in _files_of(error) if os.path.realpath(name) in points), "")


def _is_own(name: str) -> bool:
    """Whether the user has permission to write to it, so that the sandbox must be the cause."""
    return os.access(name if os.path.lexists(name) else os.path.dirname(name), os.W_OK)


def _is_here(name: str) -> bool:
    if name in ("", "localhost", socket.gethostname()):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified
