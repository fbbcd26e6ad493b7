"""The native door's shim: a small C++ library between torch's own allocator interface and
libgruyere.

It fits one build of torch and no other. The package brings those for the builds of torch that the
index has. For another it is built on this machine, once, with the machine's C++ compiler
(`_shim_compiler.py`), against the headers of the torch that is installed, and kept in a folder of
the user's (`_shim_folders.py`) under a name made of all that it depends on. Whatever is missing is
no error: the pluggable door serves then, and one line says why.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional, Union

from . import _library, _shim_compiler, _shim_folders
from ._shim_folders import Unavailable

# The versions of torch whose interface native/ is written for.
OLDEST, NEWEST = (2, 11), (2, 15)

_HERE = Path(__file__).resolve().parent
_loaded: Optional[ctypes.CDLL] = None
_file: Optional[Path] = None


@contextlib.contextmanager
def _unavailable() -> Iterator[None]:
    """Whatever the machine refuses is a reason why there is no shim, and never an error of the
    program."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise Unavailable(f"the shim cannot be had: {error}") from error


def install(torch: Any) -> None:
    """Makes the native door's object torch's allocator, building the shim first where there is
    none. Raises Unavailable, and changes nothing, where that cannot be."""
    global _loaded, _file
    with _unavailable():
        wanted = key(torch)
        file, shim = _prebuilt(wanted)
        if shim is None:
            file = _find(torch, wanted)
            _shim_folders.check_owner(file)
            shim = _load(file, wanted)
    message = ctypes.create_string_buffer(4096)
    try:
        find = ctypes.cast(_library.library().gruyere_native_table, ctypes.c_void_p)
    except AttributeError as error:
        raise Unavailable(
            "this libgruyere.so is older than the native door: install gruyere again"
        ) from error
    if shim.gruyere_shim_install(find, message, ctypes.c_size_t(len(message))) != 0:
        raise Unavailable(message.value.decode(errors="replace"))
    _loaded, _file = shim, file


def is_current() -> bool:
    """Whether what `install` put in place still is."""
    return _loaded is not None and bool(_loaded.gruyere_shim_is_current())


def counts_rejections(torch: Any, door: str) -> bool:
    """Whether, by this door, requests above the limit count as torch counts those that its setting
    `throw_on_cudamalloc_oom` refuses: torch has the setting from 2.12 on."""
    return door == "native" and _version(torch.__version__) >= (2, 12)


def file() -> Optional[Path]:
    """The shim that `install` has loaded."""
    return _file


def _prebuilt(wanted: str) -> tuple[Optional[Path], Optional[ctypes.CDLL]]:
    """The one that the package brings for this build of torch, where there is one that this machine
    can load."""
    for file in (_HERE / "native" / "prebuilt").glob(f"*-{wanted}.so"):
        with contextlib.suppress(Unavailable):
            return file, _load(file, wanted)
    return None, None


def _load(file: Path, wanted: str) -> ctypes.CDLL:
    try:
        shim = ctypes.CDLL(str(file))
        shim.gruyere_shim_build.restype = ctypes.c_char_p
        built_from = shim.gruyere_shim_build().decode()
    except (OSError, AttributeError) as error:
        remedy = "python -m gruyere --build-shim builds it anew"
        if "GLIBCXX_" in str(error) or "CXXABI_" in str(error):
            remedy = (
                "the compiler's C++ library is newer than the one that this Python has loaded: "
                "name an older compiler, or this environment's (conda install gxx), in CXX"
            )
        raise Unavailable(f"{file} cannot be loaded ({error}); {remedy}") from error
    if built_from != wanted:
        raise Unavailable(
            f"{file} was built for another torch or gruyere; python -m gruyere --build-shim "
            "builds it anew"
        )
    return shim


def build(torch: Any, anew: bool = False) -> Path:
    """The shim's file, built where there is none (or `anew`). Raises Unavailable where it cannot be
    had."""
    with _unavailable():
        return _find(torch, key(torch), anew)


def _find(torch: Any, wanted: str, anew: bool = False) -> Path:
    """As `build`, of a shim whose `key` is `wanted`: in the first of the folders that has it, or
    built in the first in which that can be."""
    reasons: list[str] = []
    folders: list[Path] = []
    for make in (_shim_folders.home, _shim_folders.temporary):
        try:
            folder = make()
        except Unavailable as error:
            reasons.append(str(error))
            continue
        found = None if anew else _built(folder, torch, wanted)
        if found:
            return found
        folders.append(folder)
    if not folders:
        raise Unavailable("; ".join(reasons))
    return _build(torch, wanted, _shim_compiler.compiler(), folders, reasons, anew)


def _built(folder: Path, torch: Any, wanted: str) -> Optional[Path]:
    """The shim in `folder` that was built from the headers that this torch has, if there is one.
    Nobody is waited for: it takes its name when it is whole."""
    with contextlib.suppress(OSError):
        headers = (folder / f"shim-{wanted}.headers").read_text(encoding="utf-8").splitlines()
        file = folder / _name(torch, wanted, headers)
        return file if file.exists() else None
    return None


def _name(torch: Any, wanted: str, headers: list[str]) -> str:
    """What the shim is called that was built from these headers of torch's. Those of the compiler
    and of the system are no part of it: what they have become changes nothing in what is built, and
    a node without a compiler takes what another has built in the same home."""
    root = _include_of(torch)
    contents = (part for name in headers for part in (name, (root / name).read_bytes()))
    return f"shim-{wanted}-{_digest(*contents)}.so"


def _build(
    torch: Any,
    wanted: str,
    compiler: _shim_compiler.Compiler,
    folders: list[Path],
    reasons: list[str],
    anew: bool,
) -> Path:
    """Builds it in the first of the folders, or where that is what stands in the way in the
    next."""
    folder, *others = folders
    # Another compiler may take what one refused.
    failed = folder / f"shim-{wanted}-{compiler.digest}.failed"

    def known() -> Optional[Path]:
        if anew:
            return None
        if failed.exists():
            before = failed.read_text(encoding="utf-8").strip()
            raise Unavailable(f"{before} (python -m gruyere --build-shim tries again)")
        return next(filter(None, (_built(one, torch, wanted) for one in folders)), None)

    with contextlib.ExitStack() as turn:
        try:
            # The first of many ranks builds it.
            found = known() or turn.enter_context(_shim_folders.alone(folder, known)) or known()
            return found or _compiled(torch, wanted, compiler, folder, failed)
        except (_shim_compiler.Elsewhere, OSError) as error:
            reasons.append(f"the shim could not be built in {folder}: {error}")
        # With the turn still kept: the others would find the same, each after a build in vain.
        if others:
            return _build(torch, wanted, compiler, others, reasons, anew)
    raise Unavailable("; ".join(reasons))


def _compiled(
    torch: Any, wanted: str, compiler: _shim_compiler.Compiler, folder: Path, failed: Path
) -> Path:
    _shim_folders.sweep(folder)
    with contextlib.suppress(OSError):
        failed.unlink()
    try:
        with _shim_compiler.built(compiler, request(torch, wanted), folder) as made:
            file = folder / _name(torch, wanted, made.headers)
            made.file.chmod(0o600)
            made.file.rename(file)
            # Last, because this file makes it findable.
            made.list.rename(folder / f"shim-{wanted}.headers")
    except _shim_compiler.Refused as error:
        _shim_folders.remember(failed, str(error))
        raise
    return file


def request(torch: Any, wanted: str) -> _shim_compiler.Request:
    """What is to be compiled for this torch."""
    include = _include_of(torch)
    if not (include / "c10" / "cuda" / "CUDACachingAllocator.h").is_file():
        raise Unavailable(
            f"torch's C++ headers are not in {include}, as in a frozen application: install torch "
            "with pip or conda"
        )
    major, minor = _version(torch.version.cuda)
    return _shim_compiler.Request(
        torch=torch.__version__,
        standard="c++20" if _version(torch.__version__) >= (2, 14) else "c++17",
        abi=int(torch._C._GLIBCXX_USE_CXX11_ABI),
        cuda=major * 1000 + minor * 10,
        key=wanted,
        source=sources()[-1],
        ours=gruyere_h().parent,
        headers=include,
        cuda_headers=_HERE / "native" / "cuda",
        libraries=Path(torch.__file__).parent / "lib",
    )


def key(torch: Any, machine: str = platform.machine()) -> str:
    """What a shim must have been built from to be used: this torch, this source."""
    version = _version(torch.__version__)
    if version < OLDEST:
        raise Unavailable(
            f"torch {torch.__version__} has an older interface; torch {_words(OLDEST)} to "
            f"{_words(NEWEST)} have a native door"
        )
    if version > NEWEST:
        raise Unavailable(
            f"torch {torch.__version__} is newer than {_words(NEWEST)}, the newest whose interface "
            "this gruyere knows: a newer gruyere may (pip install --upgrade gruyere)"
        )
    try:
        return _digest(
            torch.__version__,
            str(torch.version.git_version),
            str(torch.version.cuda),
            str(torch._C._GLIBCXX_USE_CXX11_ABI),
            machine,
            *(file.read_bytes() for file in [*sources(), gruyere_h()]),
        )
    except OSError as error:
        raise Unavailable(
            f"{error.filename} is missing, which the native door's shim is built from: install "
            "gruyere again, as files in a folder"
        ) from error


def _version(text: Any) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", str(text))
    if not found:
        raise Unavailable(f"this torch's version ({text}) cannot be read")
    return int(found[1]), int(found[2])


def _words(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def sources() -> list[Path]:
    """What is compiled, and before it what it includes."""
    folder = _HERE / "native"
    headers = sorted({*folder.glob("*.h"), *folder.glob("cuda/*.h")} - {folder / "gruyere.h"})
    return [*headers, folder / "shim.cpp"]


def gruyere_h() -> Path:
    """Beside the source in an installed package, and in a clone of the repository where it is
    written."""
    installed = _HERE / "native" / "gruyere.h"
    return installed if installed.is_file() else _HERE.parent.parent / "include" / "gruyere.h"


def _include_of(torch: Any) -> Path:
    return Path(torch.__file__).parent / "include"


def _digest(*parts: Union[str, bytes]) -> str:
    whole = hashlib.sha256()
    for part in parts:
        # Independent of the locale's encoding of files.
        content = part.encode() if isinstance(part, str) else part
        whole.update(b"%d:%b" % (len(content), content))
    return whole.hexdigest()[:24]
