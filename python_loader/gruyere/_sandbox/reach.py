"""Finds out from an exception what the sandbox denied: a file that cannot be written to, or a host
that cannot be reached. The names of hosts, which the kernel's errors lack, come from Python's audit
events.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import sys
from typing import Any

from .._bench.measure import causes

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
            if name and (number == errno.EROFS or (number in _DENIED and _is_own(name))):
                found.append({"kind": "write", "name": name})
            elif "network" in self.closed and (
                names & _OF_NETWORK or (is_os and number in _UNREACHED)
            ):
                found.append({"kind": "network", "name": self._host(cause)})
        return found

    def _host(self, cause: BaseException) -> str:
        return self.hosts[-1] if self.hosts else f"another machine ({type(cause).__name__})"


def _file_of(error: BaseException) -> str:
    """The file that an error names; empty if it names none."""
    name = error.filename if isinstance(error, OSError) else None
    return os.path.abspath(os.fsdecode(name)) if isinstance(name, (str, bytes)) else ""


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
