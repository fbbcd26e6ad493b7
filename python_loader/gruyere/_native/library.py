"""libgruyere.so: finding and loading it, and the functions that the whole package uses."""

from __future__ import annotations

import ctypes
import os
from importlib import metadata
from pathlib import Path
from typing import Optional

from .._errors import GruyereError

VARIABLE = "GRUYERE_LIBRARY"

_loaded: Optional[ctypes.CDLL] = None


class _Object(ctypes.Structure):
    """`Dl_info`: the shared object and the symbol at an address."""

    _fields_ = [
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    ]


def preloaded() -> Optional[Path]:
    """The file of the copy that LD_PRELOAD has loaded into this process, or None. There must not be
    a second copy: a process has one heap."""
    process = ctypes.CDLL(None)
    try:
        function = ctypes.cast(process.gruyere_malloc, ctypes.c_void_p)
    except AttributeError:
        return None
    where = _Object()
    if not process.dladdr(function, ctypes.byref(where)) or not where.file:
        return None
    return Path(os.fsdecode(where.file)).absolute()


def path() -> Path:
    """The library's file: the preloaded one, else `$GRUYERE_LIBRARY`, else the one installed with
    this package.

    Raises GruyereError if there is none.
    """
    inside = preloaded()
    if inside is not None:
        return inside
    chosen = os.environ.get(VARIABLE)
    file = Path(chosen) if chosen else Path(__file__).resolve().parent.with_name("libgruyere.so")
    if file.is_file():
        return file.absolute()
    if chosen:
        raise GruyereError(
            f"{VARIABLE}={chosen}: no such file; set it to the path of libgruyere.so, or unset "
            f"{VARIABLE} to use the installed library"
        )
    raise GruyereError(
        f"{file} is missing: this copy of the package has not been built. Install it (pip install "
        "./python_loader, which needs Rust), or build the library (cargo build --release) and set "
        f"{VARIABLE}=target/release/libgruyere.so"
    )


def load() -> ctypes.CDLL:
    """The library, loaded once. Calls through it release the GIL. A function that is not declared
    in `_declare` is declared by the module that uses it."""
    global _loaded
    if _loaded is None:
        file = path()
        try:
            # For a preloaded library this returns the copy that is loaded already.
            loaded = ctypes.CDLL(str(file))
            _declare(loaded)
        except (OSError, AttributeError) as error:
            raise GruyereError(
                f"{file} cannot be loaded ({error}): it is damaged, built for another machine, or "
                "of another version; reinstall gruyere"
            ) from error
        if preloaded() is not None:
            _check_version(file, (loaded.gruyere_version() or b"").decode())
        _loaded = loaded
    return _loaded


def _check_version(file: Path, found: str) -> None:
    """Raise GruyereError if a preloaded library is not of this package's version. A package that is
    not installed has no version and accepts any library."""
    try:
        expected = metadata.version("gruyere")
    except metadata.PackageNotFoundError:
        return
    if found != expected:
        raise GruyereError(
            f"LD_PRELOAD has loaded {file}, version {found}, into this process, but this package "
            f"is version {expected}: preload libgruyere.so of version {expected} (as `gruyere run` "
            "of the same installation does), or unset LD_PRELOAD"
        )


def _declare(loaded: ctypes.CDLL) -> None:
    loaded.gruyere_announce_hooks.argtypes = [ctypes.c_uint32]
    loaded.gruyere_announce_hooks.restype = None
    loaded.gruyere_allow_waits.argtypes = []
    loaded.gruyere_allow_waits.restype = None
    loaded.gruyere_forbid_waits.argtypes = [ctypes.c_char_p]
    loaded.gruyere_forbid_waits.restype = None
    loaded.gruyere_announce_rank.argtypes = [ctypes.c_int64, ctypes.c_int64]
    loaded.gruyere_announce_rank.restype = ctypes.c_int
    loaded.gruyere_close.argtypes = []
    loaded.gruyere_close.restype = None
    loaded.gruyere_version.argtypes = []
    loaded.gruyere_version.restype = ctypes.c_char_p
    loaded.gruyere_check_configuration.argtypes = [
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_size_t,
    ]
    loaded.gruyere_check_configuration.restype = ctypes.c_int
    loaded.gruyere_trim.argtypes = []
    loaded.gruyere_trim.restype = ctypes.c_uint64


def address(name: str) -> int:
    """The address of the library's function `name`, in the form that torch takes."""
    found = ctypes.cast(getattr(load(), name), ctypes.c_void_p).value
    assert found is not None, name
    return found
