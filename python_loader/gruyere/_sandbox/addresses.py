"""The addresses that a program under Landlock may reach: loopback, and sockets that the run made.

A socket of the internet is made by us and bound to the loopback device before the program gets it,
so nothing that it sends leaves the machine, whatever the program does. The addresses are checked
too, so that the program gets an error at once and the refusal a name. Paths of sockets are only
checked: the program could change one between the check and the kernel's own look.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from typing import Callable, Optional

from . import filter, kernel

# The longest address, and the most messages of a call, as in the kernel.
_LONGEST, _MESSAGES = 128, 1024
# struct msghdr begins with the address's pointer and length; struct mmsghdr is larger.
_HEADER, _MESSAGE, _MESSAGE_OF_MANY = struct.Struct("=Qi"), 56, 64
_KIND = 0xF


class Network:
    def __init__(self, is_open: Callable[[str], bool], refuse: Callable[[str, str], None]) -> None:
        """`is_open`: whether the program may connect to the socket at an absolute path. `refuse`:
        called with the kind and the name of what is refused."""
        self.is_open = is_open
        self.refuse = refuse
        self.calls = {filter.number(name): name for name in filter.OF_NETWORK}

    def answer(self, call: kernel.Call) -> None:
        """Answer a call that makes a socket or has an address. Raises OSError if the process is
        gone or its memory cannot be read."""
        if self.calls[call.number] == filter.SOCKET:
            _make(call)
            return
        connects = self.calls[call.number] == filter.CONNECT
        for address in self._addresses(call):
            error = self._refused(call, address, connects)
            if error:
                call.refuse(error)
                return
        call.go_on()

    def _addresses(self, call: kernel.Call) -> Iterator[bytes]:
        name, arguments = self.calls[call.number], call.arguments
        if name in (filter.CONNECT, filter.SEND):
            place = 1 if name == filter.CONNECT else 4
            yield _address(call, arguments[place], arguments[place + 1] & 0xFFFFFFFF)
            return
        many = name == filter.SEND_MANY
        size = _MESSAGE_OF_MANY if many else _MESSAGE
        count = min(arguments[2] & 0xFFFFFFFF, _MESSAGES) if many else 1
        # Of what is not readable, the kernel sends nothing.
        headers = call.read(arguments[1], count * size) if count else b""
        for start in range(0, len(headers) - _HEADER.size + 1, size):
            place, length = _HEADER.unpack_from(headers, start)
            if place and length > 0:
                yield _address(call, place, length)

    def _refused(self, call: kernel.Call, address: bytes, connects: bool) -> int:
        """The error number with which to refuse an address; 0 if it may be reached."""
        path = _path(address)
        if path is not None:
            shown = os.path.join(os.readlink(f"/proc/{call.thread}/cwd"), path)
            real = os.path.realpath(call.seen(shown))
            if self.is_open(real):
                return 0
            if not os.path.lexists(real):
                # Libraries look for services that are not there.
                return errno.ENOENT
            self.refuse("socket", real)
            return errno.EACCES
        where = outside(address, connects)
        if where is None:
            return 0
        self.refuse("network", where)
        return errno.ENETUNREACH


def _address(call: kernel.Call, place: int, length: int) -> bytes:
    return call.read(place, min(length, _LONGEST))


def _path(address: bytes) -> Optional[str]:
    """The path in the address of a socket; None for other addresses. An abstract name is none."""
    if len(address) < 3 or struct.unpack_from("=H", address)[0] != socket.AF_UNIX:
        return None
    return os.fsdecode(address[2:].split(b"\0")[0]) or None


def _make(call: kernel.Call) -> None:
    """Make a socket of the internet that reaches loopback only, and give it to the program."""
    family, kind, protocol = (argument & 0xFFFFFFFF for argument in call.arguments[:3])
    if kind & _KIND not in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        # Raw sockets: the program would write the headers itself.
        call.refuse(errno.EPERM)
        return
    try:
        with socket.socket(family, kind, protocol) as made:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo\0")
            call.give(made.fileno(), bool(kind & socket.SOCK_CLOEXEC))
    except (OSError, OverflowError) as error:
        # Without loopback there is nothing that it could reach.
        call.refuse(getattr(error, "errno", None) or errno.EINVAL)


def outside(address: bytes, connects: bool) -> Optional[str]:
    """The address in a sockaddr, as text; None if it is on this machine."""
    if len(address) < 2:
        return None
    (family,) = struct.unpack_from("=H", address)
    if family in (socket.AF_UNIX, socket.AF_NETLINK):
        return None
    if family == socket.AF_UNSPEC and connects:
        # It ends a connection.
        return None
    ip: "ipaddress.IPv4Address | ipaddress.IPv6Address"
    # Without a family, the kernel sends to the address as one of IPv4.
    if family in (socket.AF_INET, socket.AF_UNSPEC):
        if len(address) < 8:
            return None
        ip = ipaddress.IPv4Address(address[4:8])
        shown = str(ip)
    elif family == socket.AF_INET6:
        if len(address) < 24:
            return None
        six = ipaddress.IPv6Address(address[8:24])
        ip = six.ipv4_mapped or six
        shown = f"[{ip}]"
    else:
        return f"an address of family {family}"
    (port,) = struct.unpack_from("!H", address, 2)
    return None if ip.is_loopback or ip.is_unspecified else f"{shown}:{port}"
