"""Check that this process runs on the stand-in GPU. Otherwise a dry run would use a real GPU and
report its figures as those of the requested one."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any, Optional

# A function that only the stand-in has, and one of libcuda.
_OWN, _DRIVERS = "phantom_physical", "cuInit"
# <elf.h>: whether the kernel started this process in the dynamic loader's secure mode.
_AT_SECURE = 23
_NOT = "the program's process does not run on the stand-in GPU"


def away() -> Optional[str]:
    """Why this process does not run on the stand-in, and the remedy; None if it does."""
    process = ctypes.CDLL(None)
    own = _address(process, _OWN)
    if own is None:
        return f"{_NOT}: {_unloaded(process)}"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return _other(f"cannot be loaded ({error})")
    if _address(driver, _OWN) != own:
        return _other("is not the stand-in")
    if _address(process, _DRIVERS) != _address(driver, _DRIVERS):
        return (
            f"{_NOT}: a library that is loaded before it also has {_DRIVERS}; remove that library "
            f"from LD_PRELOAD={os.environ.get('LD_PRELOAD', '')}"
        )
    return None


def _unloaded(process: ctypes.CDLL) -> str:
    """Why LD_PRELOAD has not loaded the stand-in."""
    if process.getauxval(_AT_SECURE):
        return (
            "the dynamic loader ignores LD_PRELOAD for privileged programs, and "
            f"{sys.executable} is one (it has a set-user-ID or set-group-ID bit or capabilities: "
            "ls -l and getcap show them); pass a copy of it without them to --python"
        )
    preloaded = os.environ.get("LD_PRELOAD")
    if preloaded is None:
        return (
            f"LD_PRELOAD, which loads it, was removed from the environment; {sys.executable} "
            "seems to be a script that starts python without it: pass python itself to --python"
        )
    return (
        f"LD_PRELOAD={preloaded} has not loaded it; {sys.executable} seems to be a script that "
        "changes LD_PRELOAD, or a statically linked program: pass python itself to --python"
    )


def _other(what: str) -> str:
    return (
        f"{_NOT}: libcuda.so.1 {what}, with LD_LIBRARY_PATH="
        f"{os.environ.get('LD_LIBRARY_PATH', '')}; {sys.executable} seems to be a script that "
        "changes it: pass python itself to --python"
    )


def _address(library: ctypes.CDLL, name: str) -> Optional[int]:
    function: Any = getattr(library, name, None)
    return None if function is None else ctypes.cast(function, ctypes.c_void_p).value
