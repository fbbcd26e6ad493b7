"""libgruyere.so: where it is, and the functions of it that every part of the package needs."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Optional

from ._errors import GruyereError

VARIABLE = "GRUYERE_LIBRARY"

_loaded: Optional[ctypes.CDLL] = None


def path() -> Path:
    """The library's file: `$GRUYERE_LIBRARY`, or the one that was installed with this package.

    Raises GruyereError where there is none.
    """
    chosen = os.environ.get(VARIABLE)
    file = Path(chosen) if chosen else Path(__file__).with_name("libgruyere.so")
    if file.is_file():
        return file.absolute()
    if chosen:
        raise GruyereError(f"{VARIABLE}={chosen}: no such file; name libgruyere.so there, or unset {VARIABLE} to use the installed one")
    raise GruyereError(
        f"{file} is missing: this copy of the package was not built. Install it (pip install ./python_loader, which needs Rust), or"
        f" build the library (cargo build --release) and set {VARIABLE}=target/release/libgruyere.so"
    )


def library() -> ctypes.CDLL:
    """The library, loaded once. Calls through it release the GIL. Whoever uses a function that is not declared here declares it
    where it is used."""
    global _loaded
    if _loaded is None:
        file = path()
        try:
            loaded = ctypes.CDLL(str(file))
            _declare(loaded)
        except (OSError, AttributeError) as error:
            raise GruyereError(
                f"{file} cannot be loaded ({error}): it is damaged, made for another machine or of another version; install gruyere again"
            ) from error
        _loaded = loaded
    return _loaded


def _declare(loaded: ctypes.CDLL) -> None:
    loaded.gruyere_announce_hooks.argtypes = [ctypes.c_uint32]
    loaded.gruyere_announce_hooks.restype = None
    loaded.gruyere_version.argtypes = []
    loaded.gruyere_version.restype = ctypes.c_char_p
    loaded.gruyere_check_configuration.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t]
    loaded.gruyere_check_configuration.restype = ctypes.c_int
    loaded.gruyere_trim.argtypes = []
    loaded.gruyere_trim.restype = ctypes.c_uint64


def address(name: str) -> int:
    """The address of the library's function `name`, as torch wants it."""
    found = ctypes.cast(getattr(library(), name), ctypes.c_void_p).value
    assert found is not None, name
    return found
