"""What a program fails of in a sandbox, by the error: a file that can't be written to, a host that
can't be reached. What the kernel refuses without a name, Python's audit events have named before.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import sys
from typing import Any

from .._bench.measure import causes

# An overlay can't copy another user's file that a group may write to.
_DENIED = (errno.EPERM, errno.EACCES, errno.EOVERFLOW)
_UNREACHED = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN)
# Errors of clients of HTTP and of hubs, by the names of their classes: this imports none of them.
_OF_NETWORK = {
    "ConnectError", "ConnectionError", "ConnectTimeout", "URLError", "MaxRetryError",
    "NewConnectionError", "NameResolutionError", "ClientConnectorError", "EndpointConnectionError",
    "LocalEntryNotFoundError", "OfflineModeIsEnabled", "gaierror", "APIConnectionError",
    "CommError",
}  # fmt: skip


class Reach:
    def __init__(self, closed: list[str]) -> None:
        """`closed`: what the sandbox closes, of "files" and "network" (`Box.closed`)."""
        self.closed = closed
        self.hosts: list[str] = []

    def watch(self) -> None:
        """Before the program runs. Can't be taken back."""
        sys.addaudithook(self._heard)

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        # For every event there is: most end here.
        if event == "socket.getaddrinfo" or event == "socket.gethostbyname":
            self._asked(arguments[0])
        elif event == "socket.connect" and isinstance(arguments[1], tuple):
            self._asked(arguments[1][0])

    def _asked(self, host: Any) -> None:
        name = host.decode(errors="replace") if isinstance(host, bytes) else host
        if isinstance(name, str) and name not in self.hosts and not _is_here(name):
            self.hosts.append(name)

    def behind(self, error: BaseException) -> list[dict[str, str]]:
        """What the sandbox has to do with it; empty: nothing that is known."""
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
    """The file that an error is about; empty where none is named."""
    name = error.filename if isinstance(error, OSError) else None
    return os.path.abspath(os.fsdecode(name)) if isinstance(name, (str, bytes)) else ""


def _is_own(name: str) -> bool:
    """Whether the user might write to it, so that it must be the sandbox that does not let them."""
    return os.access(name if os.path.lexists(name) else os.path.dirname(name), os.W_OK)


def _is_here(name: str) -> bool:
    if name in ("", "localhost", socket.gethostname()):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified
