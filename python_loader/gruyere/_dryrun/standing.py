"""Whether this process is on the stand-in GPU: a dry run that is not would run on a real one, and
tell its figures as those of the GPU that was asked for."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any, Optional

# A function of the stand-in's own, and one of libcuda's.
_OWN, _DRIVERS = "phantom_physical", "cuInit"
# <elf.h>: whether the kernel started this process in the loader's secure mode.
_AT_SECURE = 23
_NOT = "the program's process is not on the stand-in GPU"


def away() -> Optional[str]:
    """Why this process is not on the stand-in, and the remedy; None where it is."""
    process = ctypes.CDLL(None)
    own = _address(process, _OWN)
    if own is None:
        return f"{_NOT}: {_unloaded(process)}"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return _other(f"cannot be loaded ({error})")
    if _address(driver, _OWN) != own:
        return _other("is another library than the stand-in")
    if _address(process, _DRIVERS) != _address(driver, _DRIVERS):
        return (
            f"{_NOT}: another library, that is loaded before it, has {_DRIVERS} too; take that "
            f"out of LD_PRELOAD={os.environ.get('LD_PRELOAD', '')}"
        )
    return None


def _unloaded(process: ctypes.CDLL) -> str:
    """Why LD_PRELOAD has not brought it."""
    if process.getauxval(_AT_SECURE):
        return (
            "the loader of libraries passes over LD_PRELOAD for privileged programs, and "
            f"{sys.executable} is one (a set-user-ID or set-group-ID bit, or capabilities: ls -l "
            "and getcap show them); name a copy of it without them with --python"
        )
    preloaded = os.environ.get("LD_PRELOAD")
    if preloaded is None:
        return (
            f"LD_PRELOAD, which brings it, was taken out of the environment; {sys.executable} "
            "seems to be a script that starts python without it: name python itself with --python"
        )
    return (
        f"LD_PRELOAD={preloaded} has not brought it; {sys.executable} seems to be a script that "
        "changes it, or a program without a loader of libraries: name python itself with --python"
    )


def _other(what: str) -> str:
    return (
        f"{_NOT}: libcuda.so.1 {what}, with LD_LIBRARY_PATH="
        f"{os.environ.get('LD_LIBRARY_PATH', '')}; {sys.executable} seems to be a script that "
        "changes it: name python itself with --python"
    )


def _address(library: ctypes.CDLL, name: str) -> Optional[int]:
    function: Any = getattr(library, name, None)
    return None if function is None else ctypes.cast(function, ctypes.c_void_p).value
