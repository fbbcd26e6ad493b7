"""libgruyere.so: where it is, and the functions of it that every part of the package needs."""

from __future__ import annotations

import ctypes
import os
from importlib import metadata
from pathlib import Path
from typing import Optional

from ._errors import GruyereError

VARIABLE = "GRUYERE_LIBRARY"

_loaded: Optional[ctypes.CDLL] = None


class _Object(ctypes.Structure):
    """`Dl_info`: the shared object that an address is in, and the symbol."""

    _fields_ = [
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    ]


def preloaded() -> Optional[Path]:
    """The file of the copy that LD_PRELOAD has put into this process, if it has. There must not be
    a second one: a process has one heap."""
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
    """The library's file: the one that is preloaded, else `$GRUYERE_LIBRARY`, else the one that was
    installed with this package.

    Raises GruyereError where there is none.
    """
    inside = preloaded()
    if inside is not None:
        return inside
    chosen = os.environ.get(VARIABLE)
    file = Path(chosen) if chosen else Path(__file__).with_name("libgruyere.so")
    if file.is_file():
        return file.absolute()
    if chosen:
        raise GruyereError(
            f"{VARIABLE}={chosen}: no such file; name libgruyere.so there, or unset {VARIABLE} "
            "to use the installed one"
        )
    raise GruyereError(
        f"{file} is missing: this copy of the package was not built. Install it (pip install "
        "./python_loader, which needs Rust), or"
        " build the library (cargo build --release) and set "
        f"{VARIABLE}=target/release/libgruyere.so"
    )


def library() -> ctypes.CDLL:
    """The library, loaded once. Calls through it release the GIL. Whoever uses a function that is
    not declared here declares it where it is used."""
    global _loaded
    if _loaded is None:
        file = path()
        try:
            # A preloaded library is found here as the copy that is there.
            loaded = ctypes.CDLL(str(file))
            _declare(loaded)
        except (OSError, AttributeError) as error:
            raise GruyereError(
                f"{file} cannot be loaded ({error}): it is damaged, made for another machine "
                "or of another version; install gruyere again"
            ) from error
        if preloaded() is not None:
            _check_version(file, (loaded.gruyere_version() or b"").decode())
        _loaded = loaded
    return _loaded


def _check_version(file: Path, found: str) -> None:
    """Refuses a preloaded library that is not of this package's version. A copy that was never
    installed has none, and takes what there is."""
    try:
        expected = metadata.version("gruyere")
    except metadata.PackageNotFoundError:
        return
    if found != expected:
        raise GruyereError(
            f"LD_PRELOAD has put {file}, of version {found}, into this process, and this "
            f"package is of version {expected}: preload the"
            f" libgruyere.so of version {expected} (`gruyere run` of the same installation "
            "does), or unset LD_PRELOAD"
        )


def _declare(loaded: ctypes.CDLL) -> None:
    loaded.gruyere_announce_hooks.argtypes = [ctypes.c_uint32]
    loaded.gruyere_announce_hooks.restype = None
    loaded.gruyere_allow_waits.argtypes = []
    loaded.gruyere_allow_waits.restype = None
    loaded.gruyere_forbid_waits.argtypes = [ctypes.c_char_p]
    loaded.gruyere_forbid_waits.restype = None
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
    """The address of the library's function `name`, as torch wants it."""
    found = ctypes.cast(getattr(library(), name), ctypes.c_void_p).value
    assert found is not None, name
    return found
