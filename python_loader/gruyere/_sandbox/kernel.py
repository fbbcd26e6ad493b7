"""System calls that Python has no function for. Each raises OSError."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import re
import socket
import struct
from typing import Optional

_LIBC = ctypes.CDLL(None, use_errno=True)

# Call numbers that are the same on all architectures (include/uapi/asm-generic/unistd.h).
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442
_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
_SECCOMP = {"x86_64": 317, "aarch64": 277}

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWNET = 0x00020000, 0x10000000, 0x40000000
MS_RDONLY, MS_BIND, MS_REC, MS_PRIVATE = 0x1, 0x1000, 0x4000, 0x40000
CAP_SYS_ADMIN = 21

_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP = 1, 24
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38


def machine() -> str:
    return platform.machine()


def _checked(result: int, path: Optional[str] = None) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return result


def _syscall(number: int, *arguments: object, path: Optional[str] = None) -> int:
    return _checked(_LIBC.syscall(ctypes.c_long(number), *arguments), path)


# Processes.


def _prctl(option: int, value: int) -> None:
    nothing = ctypes.c_ulong(0)
    _checked(_LIBC.prctl(option, ctypes.c_ulong(value), nothing, nothing, nothing))


def die_with_parent(signal: int) -> None:
    """Have the kernel send us `signal` when our parent ends."""
    _prctl(_PR_SET_PDEATHSIG, signal)


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def forbid_new_privileges() -> None:
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def drop_from_bounding_set(capability: int) -> None:
    _prctl(_PR_CAPBSET_DROP, capability)


# Namespaces.


def unshare(flags: int) -> None:
    _checked(_LIBC.unshare(flags))


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    _checked(
        _LIBC.mount(
            os.fsencode(source), os.fsencode(target), kind.encode() or None,
            ctypes.c_ulong(flags), os.fsencode(options) or None,
        ),
        target,
    )  # fmt: skip


# <linux/mount.h>, <linux/fcntl.h>.
READ_ONLY, NO_DEVICES = 0x1, 0x4
_HERE, _RECURSIVE = ctypes.c_int(-100), 0x8000


def clone_mount(path: str) -> int:
    """A copy of the tree of mounts at `path`, which is not mounted yet, as a descriptor."""
    clone = 1
    flags = ctypes.c_uint(clone | os.O_CLOEXEC | _RECURSIVE)
    return _syscall(_OPEN_TREE, _HERE, os.fsencode(path), flags, path=path)


def attach_mount(cloned: int, path: str) -> None:
    """Mount the copy at `path`."""
    from_descriptor, follow_links = 0x4, 0x10
    _syscall(
        _MOVE_MOUNT, ctypes.c_int(cloned), b"", _HERE, os.fsencode(path),
        ctypes.c_uint(from_descriptor | follow_links), path=path,
    )  # fmt: skip


def change_mount(path: str, add: int = 0, remove: int = 0, below: bool = False) -> None:
    """Change the attributes of the mount at `path`; with `below`, those of all mounts below it
    too, or else of none."""
    attributes = struct.pack("=QQQQ", add, remove, 0, 0)
    _syscall(
        _MOUNT_SETATTR, _HERE, os.fsencode(path), ctypes.c_uint(_RECURSIVE if below else 0),
        attributes, ctypes.c_size_t(len(attributes)), path=path,
    )  # fmt: skip


def raise_loopback() -> None:
    """Bring up the loopback device of our own network namespace."""
    get_flags, set_flags, up = 0x8913, 0x8914, 1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack_from("16sH", fcntl.ioctl(control, get_flags, request))[1]
        fcntl.ioctl(control, set_flags, struct.pack("16sH14x", b"lo", flags | up))


# Landlock (include/uapi/linux/landlock.h).

_WRITE_FILE = 1 << 1
# Changes of a folder: remove and make (each kind); from version 2 on, moves between folders; from
# version 3 on, truncation.
_CHANGES = sum(1 << bit for bit in range(4, 13))
# To remove files and folders, and to make regular files and folders.
_PLAIN_CHANGES = sum(1 << bit for bit in (4, 5, 7, 8))
_REFER, _TRUNCATE = 1 << 13, 1 << 14
# Connections to abstract sockets.
SCOPE_ABSTRACT = 1


def landlock_version() -> int:
    """The version of Landlock; 0 if the kernel lacks it or a container forbids it."""
    try:
        return _syscall(_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    except OSError:
        return 0


def landlock_rights(version: int) -> int:
    """All rights to change files in this version of Landlock."""
    newer = (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    return _WRITE_FILE | _CHANGES | newer


class Ruleset:
    """A Landlock ruleset: of `rights`, everything that is not allowed is refused. `scoped`: what
    only processes of the same sandbox may do to each other, from version 6 on."""

    def __init__(self, rights: int, scoped: int = 0) -> None:
        self.rights = rights
        attributes = struct.pack("=QQQ", rights, 0, scoped) if scoped else struct.pack("=Q", rights)
        self.handle = _syscall(
            _LANDLOCK_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0)
        )

    def allow(self, path: str, plain: bool = False) -> None:
        """Allow all rights at and below `path`. `plain`: but no links, pipes, sockets and
        devices."""
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            # The other rights apply to folders only.
            of_files = _WRITE_FILE | _TRUNCATE
            rights = self.rights if os.path.isdir(path) else self.rights & of_files
            if plain:
                rights &= _WRITE_FILE | _PLAIN_CHANGES | _REFER | _TRUNCATE
            beneath = 1
            rule = struct.pack("=Qi", rights, handle)
            _syscall(_LANDLOCK_ADD_RULE, self.handle, beneath, rule, ctypes.c_uint(0))
        finally:
            os.close(handle)

    def restrict_self(self) -> None:
        """Restrict this process and its future children. Call after `forbid_new_privileges`."""
        _syscall(_LANDLOCK_RESTRICT_SELF, self.handle, ctypes.c_uint(0))


# seccomp (include/uapi/linux/seccomp.h).


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def install_filter(instructions: bytes) -> int:
    """Install a filter on the system calls of this process and its children. Returns the descriptor
    on which the calls that it passes on arrive. Call after `forbid_new_privileges`."""
    set_mode_filter, new_listener = 1, 8
    program = _Program(len(instructions) // 8, instructions)
    return _syscall(
        _SECCOMP[machine()], ctypes.c_uint(set_mode_filter), ctypes.c_uint(new_listener),
        ctypes.byref(program),
    )  # fmt: skip


_OWN = re.compile(r"/+proc/+(?:\./+)*(?:thread-)?self(?:/+|$)")


class Call:
    """A system call that waits for our decision."""

    _WHOLE = struct.Struct("=QIIiIQ6Q")
    _RECEIVE, _SEND, _ADD = 0xC0502100, 0xC0182101, 0x40182103
    # Lets the kernel go on with the call unchanged.
    _CONTINUE = 1

    def __init__(self, listener: int) -> None:
        """Receive the next call. Raises OSError (ENOENT) if its process has ended meanwhile."""
        taken = bytearray(self._WHOLE.size)
        fcntl.ioctl(listener, self._RECEIVE, taken)
        self.listener = listener
        self.id, self.thread, _, self.number, _, _, *self.arguments = self._WHOLE.unpack(taken)

    def _answer(self, error: int, flags: int, value: int = 0) -> None:
        answer = struct.pack("=QqiI", self.id, value, -error, flags)
        try:
            fcntl.ioctl(self.listener, self._SEND, answer)
        except OSError as gone:
            if gone.errno != errno.ENOENT:
                raise

    def go_on(self) -> None:
        self._answer(0, self._CONTINUE)

    def done(self) -> None:
        """Answer a call that we have made in the program's place."""
        self._answer(0, 0)

    def refuse(self, error: int) -> None:
        self._answer(error, 0)

    def give(self, handle: int, closes: bool) -> None:
        """Answer with a descriptor of the program's own for what our `handle` is open for.
        `closes`: close it at an exec. Raises OSError if the program can have no more, or has given
        the call up."""
        at_once = 2

        def added(flags: int) -> int:
            new = os.O_CLOEXEC if closes else 0
            return fcntl.ioctl(
                self.listener, self._ADD, struct.pack("=QIIII", self.id, flags, handle, 0, new)
            )

        try:
            added(at_once)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # Before Linux 5.14.
            self._answer(0, 0, added(0))

    def read(self, address: int, length: int) -> bytes:
        """Read memory of the process; returns less if less is readable."""
        if address >= 1 << 63:
            raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
        with open(f"/proc/{self.thread}/mem", "rb", buffering=0) as memory:
            memory.seek(address)
            return memory.read(length)

    def seen(self, path: str) -> str:
        """An absolute path of the process for us, to whom /proc/self is our own process."""
        own = _OWN.match(path)
        return f"/proc/{self.thread}/{path[own.end() :]}" if own else path

    def text(self, address: int) -> bytes:
        """Read a null-terminated string from the memory of the process."""
        page, longest = 4096, 4096
        found = b""
        while len(found) < longest:
            part = self.read(address + len(found), page - (address + len(found)) % page)
            end = part.find(b"\0")
            if end >= 0:
                return found + part[:end]
            if not part:
                break
            found += part
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
