"""The seccomp filter: passes system calls of a program under Landlock to the guard if they change
files or their attributes, or use the network. Calls that only read are never delayed.

Landlock prevents writes. It does not cover modes, owners, times and extended attributes, nor
network addresses, nor whose a file in /dev/shm is. The guard does.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

from . import kernel


@dataclass(frozen=True)
class Named:
    """The arguments of a call that name a file: `folder` and `path` are argument numbers. Without a
    folder the path is relative to the current one; without a path the descriptor is the file."""

    path: Optional[int] = None
    folder: Optional[int] = None


@dataclass(frozen=True)
class Kind:
    """What a call does to the file that it names last, and the arguments that name its files."""

    what: str
    names: tuple[Named, ...]
    flags: Optional[int] = None
    """The argument with the flags of open."""
    mode: Optional[int] = None
    """The argument with the mode of a new file or folder."""


def _at(what: str, *, flags: Optional[int] = None, mode: Optional[int] = None) -> Kind:
    return Kind(what, (Named(1, 0),), flags, mode)


def _plain(what: str, *, flags: Optional[int] = None, mode: Optional[int] = None) -> Kind:
    return Kind(what, (Named(0),), flags, mode)


_OPEN, _CREATE, _TRUNCATE, _MOVE, _LINK, _CHANGE, _CHANGE_LINK = (
    "open", "create", "truncate", "move", "link", "change", "change link",
)  # fmt: skip
# Calls on an entry of a folder: they make a file of another kind, make a folder, or remove either.
_MAKE, _MAKE_FOLDER, _REMOVE = "make", "make folder", "remove"
OF_ENTRY = (_MAKE, _MAKE_FOLDER, _REMOVE, _MOVE, _LINK, _CHANGE_LINK)
# Calls that make sockets or have an address; what sets a socket's options.
SOCKET, CONNECT, SEND, SEND_MESSAGE, SEND_MANY = "socket", "connect", "send", "sendmsg", "sendmmsg"
OF_NETWORK = (SOCKET, CONNECT, SEND, SEND_MESSAGE, SEND_MANY)
_OPTION = "setsockopt"
_CONTROL = "ioctl"
# What ioctl sets of a file that is open for reading alone: its flags (FS_IOC_SETFLAGS, also of 32
# bits, FS_IOC_FSSETXATTR), FS_IOC_ENABLE_VERITY, FS_IOC_SET_ENCRYPTION_POLICY.
_SETS = (0x40086602, 0x40046602, 0x401C5820, 0x40806685, 0x800C6613)
# The call with two names that may follow a link, by a flag in its fifth argument.
LINK_AT, FOLLOWS = "linkat", 0x400
_TWO_AT = (Named(1, 0), Named(3, 2))
_OF_DESCRIPTOR = Kind(_CHANGE, (Named(None, 0),))

# Calls by name; their numbers are below.
KINDS: dict[str, Kind] = {
    "open": _plain(_OPEN, flags=1, mode=2), "openat": _at(_OPEN, flags=2, mode=3),
    "creat": _plain(_CREATE, mode=1), "truncate": _plain(_TRUNCATE),
    "mkdir": _plain(_MAKE_FOLDER, mode=1), "mkdirat": _at(_MAKE_FOLDER, mode=2),
    "mknod": _plain(_MAKE), "mknodat": _at(_MAKE),
    "rmdir": _plain(_REMOVE), "unlink": _plain(_REMOVE), "unlinkat": _at(_REMOVE),
    "symlink": Kind(_MAKE, (Named(1),)), "symlinkat": Kind(_MAKE, (Named(2, 1),)),
    "rename": Kind(_MOVE, (Named(0), Named(1))), "renameat": Kind(_MOVE, _TWO_AT),
    "renameat2": Kind(_MOVE, _TWO_AT),
    "link": Kind(_LINK, (Named(0), Named(1))), "linkat": Kind(_LINK, _TWO_AT),
    "chmod": _plain(_CHANGE), "fchmodat": _at(_CHANGE), "fchmodat2": _at(_CHANGE),
    "chown": _plain(_CHANGE), "lchown": _plain(_CHANGE_LINK), "fchownat": _at(_CHANGE),
    "utime": _plain(_CHANGE), "utimes": _plain(_CHANGE), "futimesat": _at(_CHANGE),
    "utimensat": _at(_CHANGE),
    "setxattr": _plain(_CHANGE), "lsetxattr": _plain(_CHANGE_LINK),
    "removexattr": _plain(_CHANGE), "lremovexattr": _plain(_CHANGE_LINK),
    "fchmod": _OF_DESCRIPTOR, "fchown": _OF_DESCRIPTOR, "fsetxattr": _OF_DESCRIPTOR,
    "fremovexattr": _OF_DESCRIPTOR,
}  # fmt: skip

# arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h (aarch64).
_NUMBERS = {
    "x86_64": {
        "open": 2, "openat": 257, "creat": 85, "truncate": 76, "mkdir": 83, "mkdirat": 258,
        "mknod": 133, "mknodat": 259, "rmdir": 84, "unlink": 87, "unlinkat": 263, "symlink": 88,
        "symlinkat": 266, "rename": 82, "renameat": 264, "renameat2": 316, "link": 86,
        "linkat": 265, "chmod": 90, "fchmodat": 268, "fchmodat2": 452, "chown": 92, "lchown": 94,
        "fchownat": 260, "utime": 132, "utimes": 235, "futimesat": 261, "utimensat": 280,
        "setxattr": 188, "lsetxattr": 189, "removexattr": 197, "lremovexattr": 198, "fchmod": 91,
        "fchown": 93, "fsetxattr": 190, "fremovexattr": 199, SOCKET: 41, CONNECT: 42, SEND: 44,
        SEND_MESSAGE: 46, SEND_MANY: 307, _OPTION: 54, _CONTROL: 16,
    },
    "aarch64": {
        "openat": 56, "truncate": 45, "mkdirat": 34, "mknodat": 33, "unlinkat": 35,
        "symlinkat": 36, "renameat": 38, "renameat2": 276, "linkat": 37, "fchmodat": 53,
        "fchmodat2": 452, "fchownat": 54, "utimensat": 88, "setxattr": 5, "lsetxattr": 6,
        "removexattr": 14, "lremovexattr": 15, "fchmod": 52, "fchown": 55, "fsetxattr": 7,
        "fremovexattr": 16, SOCKET: 198, CONNECT: 203, SEND: 206, SEND_MESSAGE: 211,
        SEND_MANY: 269, _OPTION: 208, _CONTROL: 29,
    },
}  # fmt: skip
# Calls that would bypass the guard and that programs can do without: io_uring; openat2, whose flags
# a filter cannot see (programs fall back to openat); and newer calls that set attributes.
_ABSENT = {"io_uring_setup": 425, "openat2": 437, "setxattrat": 463, "removexattrat": 466,
           "file_setattr": 469}  # fmt: skip
# POSIX message queues, which are the machine's: mq_open, mq_unlink.
_QUEUES = {"x86_64": (240, 241), "aarch64": (180, 181)}

_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_WRITES = 0o3 | 0o100 | 0o1000  # O_WRONLY, O_RDWR, O_CREAT, O_TRUNC
TRUNCATES = 0o1000
# What creat opens with: O_WRONLY, O_CREAT, O_TRUNC.
CREATES = 0o1 | 0o100 | 0o1000
# A connection by the first data that is sent.
_FAST_OPEN = 0x20000000
# Options of SOL_SOCKET that choose the device: SO_BINDTODEVICE, SO_BINDTOIFINDEX.
_SOL_SOCKET, _DEVICES = 1, (25, 62)

_ALLOW, _NOTIFY, _ERROR = 0x7FFF0000, 0x7FC00000, 0x00050000
# Classic BPF (include/uapi/linux/bpf_common.h).
_LOAD, _EQUAL, _ANY_BIT, _AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16


def supported() -> bool:
    return kernel.machine() in _NUMBERS


def kinds() -> dict[int, Kind]:
    """The kind of each call that is passed to the guard, by its number on this machine."""
    numbers = _NUMBERS[kernel.machine()]
    return {numbers[name]: kind for name, kind in KINDS.items() if name in numbers}


def number(name: str) -> int:
    return _NUMBERS[kernel.machine()][name]


def _instruction(code: int, value: int, on_true: int = 0, on_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, on_true, on_false, value)


def _return(action: int) -> bytes:
    return _instruction(_RETURN, action)


def _argument(place: int, high: bool = False) -> bytes:
    """Load half an argument."""
    return _instruction(_LOAD, _ARGUMENTS + 8 * place + 4 * high)


def _is_one_of(values: Sequence[int], action: int) -> list[bytes]:
    """Return `action` if what was loaded is one of the values."""
    found = []
    for value in values:
        found += [_instruction(_EQUAL, value, 0, 1), _return(action)]
    return found


def program(network: bool) -> bytes:
    """The filter program. `network`: pass network calls to the guard too."""
    known = _NUMBERS[kernel.machine()]
    absent = _return(_ERROR | errno.ENOSYS)
    parts = [
        _instruction(_LOAD, _ARCH),
        # Another ABI (32 bits) has different call numbers.
        _instruction(_EQUAL, _ARCHITECTURE[kernel.machine()], 1, 0),
        absent,
        _instruction(_LOAD, _NUMBER),
        # x32 calls, and invalid numbers.
        _instruction(_AT_LEAST, 0x40000000, 0, 1),
        absent,
    ]

    def when(number: int, then: list[bytes]) -> None:
        parts.append(_instruction(_EQUAL, number, 0, len(then)))
        parts.extend(then)

    for number in (*_ABSENT.values(), *_QUEUES[kernel.machine()]):
        when(number, [absent])
    for name, kind in KINDS.items():
        if name not in known:
            continue
        if kind.flags is None:
            when(known[name], [_return(_NOTIFY)])
        else:
            low = _ARGUMENTS + 8 * kind.flags
            when(
                known[name],
                [
                    _instruction(_LOAD, low),
                    _instruction(_ANY_BIT, _WRITES, 0, 1),
                    _return(_NOTIFY),
                    _return(_ALLOW),
                ],
            )
    sets = _is_one_of(_SETS, _ERROR | errno.EPERM)
    when(known[_CONTROL], [_argument(1), *sets, _return(_ALLOW)])
    if network:
        for number, then in _of_network(known).items():
            when(number, then)
    parts.append(_return(_ALLOW))
    return b"".join(parts)


def _of_network(known: dict[str, int]) -> dict[int, list[bytes]]:
    """What to do with each network call, by its number. Each list ends with what to return."""

    def unless_fast(place: int) -> list[bytes]:
        # Programs connect first then, as on a kernel without it.
        refusal = _return(_ERROR | errno.EOPNOTSUPP)
        return [_argument(place), _instruction(_ANY_BIT, _FAST_OPEN, 0, 1), refusal]

    families = [
        _argument(0),
        *_is_one_of((socket.AF_UNIX, socket.AF_NETLINK), _ALLOW),
        *_is_one_of((socket.AF_INET, socket.AF_INET6), _NOTIFY),
        # Packets, virtual machines, Bluetooth and the like.
        _return(_ERROR | errno.EAFNOSUPPORT),
    ]
    with_address = [
        _argument(4),
        _instruction(_EQUAL, 0, 0, 2),
        _argument(4, high=True),
        _instruction(_EQUAL, 0, 1, 0),
        _return(_NOTIFY),
        _return(_ALLOW),
    ]
    options = [
        _argument(1),
        _instruction(_EQUAL, _SOL_SOCKET, 1, 0),
        _return(_ALLOW),
        _argument(2),
        *_is_one_of(_DEVICES, _ERROR | errno.EPERM),
        _return(_ALLOW),
    ]
    return {
        known[SOCKET]: families,
        known[CONNECT]: [_return(_NOTIFY)],
        known[SEND]: [*unless_fast(3), *with_address],
        # Their addresses are in memory, which a filter cannot see.
        known[SEND_MESSAGE]: [*unless_fast(2), _return(_NOTIFY)],
        known[SEND_MANY]: [*unless_fast(3), _return(_NOTIFY)],
        known[_OPTION]: options,
    }
