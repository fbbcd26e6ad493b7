"""Runs a command for which the kernel has some system calls not: as in a container that forbids
them, whoever runs it.

    without_calls.py unshare,landlock_create_ruleset[,no-root] COMMAND...

`no-root`: as nobody, too.
"""

import ctypes
import errno
import os
import platform
import struct
import sys

# x86-64, aarch64.
NUMBERS = {
    "unshare": (272, 97),
    "mount": (165, 40),
    "landlock_create_ruleset": (444, 444),
    "connect": (42, 203),
}
NOBODY = 65534


def forbid(names):
    place = 0 if platform.machine() == "x86_64" else 1
    program = [struct.pack("=HBBI", 0x20, 0, 0, 0)]
    for name in names:
        program.append(struct.pack("=HBBI", 0x15, 0, 1, NUMBERS[name][place]))
        program.append(struct.pack("=HBBI", 0x06, 0, 0, 0x00050000 | errno.EPERM))
    program.append(struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000))

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]

    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, set_seccomp, filter_mode = 38, 22, 2
    zero = ctypes.c_ulong(0)
    assert libc.prctl(no_new_privileges, ctypes.c_ulong(1), zero, zero, zero) == 0
    whole = Program(len(program), b"".join(program))
    if libc.prctl(set_seccomp, ctypes.c_ulong(filter_mode), ctypes.byref(whole), zero, zero):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP)")


if __name__ == "__main__":
    words = [word for word in sys.argv[1].split(",") if word]
    if "no-root" in words:
        words.remove("no-root")
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    if words:
        forbid(words)
    os.execvp(sys.argv[2], sys.argv[2:])
