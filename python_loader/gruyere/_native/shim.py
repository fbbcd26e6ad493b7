"""The native door's shim: a small C++ library between torch's own allocator interface and
libgruyere.

A shim fits one build of torch and no other. The package includes shims for the builds of torch on
the package index. For another build, the machine's C++ compiler builds the shim once
(`shim_compiler.py`) against the headers of the installed torch. The shim is stored in a folder of
the user (`shim_folders.py`), under a name derived from everything it depends on. If anything is
missing, that is not an error: the pluggable door is used, and one line says why.
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

from . import library, shim_compiler, shim_folders
from .shim_folders import Unavailable as Unavailable

# The versions of torch whose interface cpp/ is written for.
OLDEST, NEWEST = (2, 11), (2, 15)

_HERE = Path(__file__).resolve().parent
_SOURCES = _HERE / "cpp"
_loaded: Optional[ctypes.CDLL] = None
_file: Optional[Path] = None


@contextlib.contextmanager
def _unavailable() -> Iterator[None]:
    """Turn errors of the operating system into Unavailable: they mean that there is no shim, and
    must not become errors of the program."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise Unavailable(f"the shim cannot be used: {error}") from error


def install(torch: Any) -> None:
    """Make the native door's object torch's allocator; build the shim first if there is none.
    Raises Unavailable and changes nothing if that is not possible."""
    global _loaded, _file
    with _unavailable():
        wanted = key(torch)
        file, shim = _prebuilt(wanted)
        if shim is None:
            file = _find(torch, wanted)
            shim_folders.check_owner(file)
            shim = _load(file, wanted)
    message = ctypes.create_string_buffer(4096)
    try:
        find = ctypes.cast(library.load().gruyere_native_table, ctypes.c_void_p)
    except AttributeError as error:
        raise Unavailable(
            "this libgruyere.so is too old to have a native door: reinstall gruyere"
        ) from error
    if shim.gruyere_shim_install(find, message, ctypes.c_size_t(len(message))) != 0:
        raise Unavailable(message.value.decode(errors="replace"))
    _loaded, _file = shim, file


def is_current() -> bool:
    """Whether the allocator that `install` put in place is still torch's allocator."""
    return _loaded is not None and bool(_loaded.gruyere_shim_is_current())


def counts_rejections(torch: Any, door: str) -> bool:
    """Whether requests above the limit are counted through this door as torch counts those refused
    by its setting `throw_on_cudamalloc_oom`, which exists from torch 2.12 on."""
    return door == "native" and _version(torch.__version__) >= (2, 12)


def file() -> Optional[Path]:
    """The file of the shim that `install` has loaded."""
    return _file


def _prebuilt(wanted: str) -> tuple[Optional[Path], Optional[ctypes.CDLL]]:
    """The shim that the package includes for this build of torch, if there is one that this machine
    can load."""
    for file in (_HERE / "prebuilt").glob(f"*-{wanted}.so"):
        with contextlib.suppress(Unavailable):
            return file, _load(file, wanted)
    return None, None


def _load(file: Path, wanted: str) -> ctypes.CDLL:
    try:
        shim = ctypes.CDLL(str(file))
        shim.gruyere_shim_build.restype = ctypes.c_char_p
        built_from = shim.gruyere_shim_build().decode()
    except (OSError, AttributeError) as error:
        remedy = "python -m gruyere --build-shim rebuilds it"
        if "GLIBCXX_" in str(error) or "CXXABI_" in str(error):
            remedy = (
                "the compiler's C++ library is newer than the one that this Python has loaded: "
                "set CXX to an older compiler, or to this environment's (conda install gxx)"
            )
        raise Unavailable(f"{file} cannot be loaded ({error}); {remedy}") from error
    if built_from != wanted:
        raise Unavailable(
            f"{file} was built for another torch or gruyere; python -m gruyere --build-shim "
            "rebuilds it"
        )
    return shim


def build(torch: Any, anew: bool = False) -> Path:
    """The shim's file, built if there is none (or if `anew`). Raises Unavailable if that is not
    possible."""
    with _unavailable():
        return _find(torch, key(torch), anew)


def _find(torch: Any, wanted: str, anew: bool = False) -> Path:
    """Like `build`, for the shim with the key `wanted`: from the first folder that has it, else
    built in the first folder that allows it."""
    reasons: list[str] = []
    folders: list[Path] = []
    for make in (shim_folders.home, shim_folders.temporary):
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
    return _build(torch, wanted, shim_compiler.compiler(), folders, reasons, anew)


def _built(folder: Path, torch: Any, wanted: str) -> Optional[Path]:
    """The shim in `folder` that was built from this torch's headers, or None. Does not wait: a shim
    gets its name only when it is complete."""
    with contextlib.suppress(OSError):
        headers = (folder / f"shim-{wanted}.headers").read_text(encoding="utf-8").splitlines()
        file = folder / _name(torch, wanted, headers)
        return file if file.exists() else None
    return None


def _name(torch: Any, wanted: str, headers: list[str]) -> str:
    """The file name of the shim built from these headers of torch. The headers of the compiler and
    of the system are not part of the name: later changes to them do not affect a shim that is
    built, and a node without a compiler can use one that another node built in the same home
    directory."""
    root = _include_of(torch)
    contents = (part for name in headers for part in (name, (root / name).read_bytes()))
    return f"shim-{wanted}-{_digest(*contents)}.so"


def _build(
    torch: Any,
    wanted: str,
    compiler: shim_compiler.Compiler,
    folders: list[Path],
    reasons: list[str],
    anew: bool,
) -> Path:
    """Build the shim in the first of the folders, or in the next one if the build fails because of
    the folder."""
    folder, *others = folders
    # Another compiler may accept what one rejected.
    failed = folder / f"shim-{wanted}-{compiler.digest}.failed"

    def known() -> Optional[Path]:
        if anew:
            return None
        if failed.exists():
            before = failed.read_text(encoding="utf-8").strip()
            raise Unavailable(f"{before} (python -m gruyere --build-shim retries)")
        return next(filter(None, (_built(one, torch, wanted) for one in folders)), None)

    with contextlib.ExitStack() as turn:
        try:
            # The first of many ranks builds it.
            found = known() or turn.enter_context(shim_folders.alone(folder, known)) or known()
            return found or _compiled(torch, wanted, compiler, folder, failed)
        except (shim_compiler.Elsewhere, OSError) as error:
            reasons.append(f"the shim could not be built in {folder}: {error}")
        # Still holding the lock: each waiting process would fail the same way after its own build.
        if others:
            return _build(torch, wanted, compiler, others, reasons, anew)
    raise Unavailable("; ".join(reasons))


def _compiled(
    torch: Any, wanted: str, compiler: shim_compiler.Compiler, folder: Path, failed: Path
) -> Path:
    shim_folders.sweep(folder)
    with contextlib.suppress(OSError):
        failed.unlink()
    try:
        with shim_compiler.built(compiler, request(torch, wanted), folder) as made:
            file = folder / _name(torch, wanted, made.headers)
            made.file.chmod(0o600)
            made.file.rename(file)
            # Last, because this file makes it findable.
            made.list.rename(folder / f"shim-{wanted}.headers")
    except shim_compiler.Refused as error:
        shim_folders.remember(failed, str(error))
        raise
    return file


def request(torch: Any, wanted: str) -> shim_compiler.Request:
    """The compile request for this torch."""
    include = _include_of(torch)
    if not (include / "c10" / "cuda" / "CUDACachingAllocator.h").is_file():
        raise Unavailable(
            f"torch's C++ headers are not in {include} (a frozen application?): install torch with "
            "pip or conda"
        )
    major, minor = _version(torch.version.cuda)
    return shim_compiler.Request(
        torch=torch.__version__,
        standard="c++20" if _version(torch.__version__) >= (2, 14) else "c++17",
        abi=int(torch._C._GLIBCXX_USE_CXX11_ABI),
        cuda=major * 1000 + minor * 10,
        key=wanted,
        source=sources()[-1],
        ours=gruyere_h().parent,
        headers=include,
        cuda_headers=_SOURCES / "cuda",
        libraries=Path(torch.__file__).parent / "lib",
    )


def key(torch: Any, machine: str = platform.machine()) -> str:
    """The key that identifies what a usable shim is built from: this torch and this source."""
    version = _version(torch.__version__)
    if version < OLDEST:
        raise Unavailable(
            f"torch {torch.__version__} has an older interface; the native door supports torch "
            f"{_words(OLDEST)} to {_words(NEWEST)}"
        )
    if version > NEWEST:
        raise Unavailable(
            f"torch {torch.__version__} is newer than {_words(NEWEST)}, the newest version that "
            "this gruyere supports: a newer gruyere may support it (pip install --upgrade gruyere)"
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
            f"{error.filename} is missing, and the native door's shim is built from it: reinstall "
            "gruyere, as files in a folder"
        ) from error


def _version(text: Any) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", str(text))
    if not found:
        raise Unavailable(f"torch's version ({text}) cannot be parsed")
    return int(found[1]), int(found[2])


def _words(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def sources() -> list[Path]:
    """The files that are included, followed by the one that is compiled."""
    folder = _SOURCES
    headers = sorted({*folder.glob("*.h"), *folder.glob("cuda/*.h")} - {folder / "gruyere.h"})
    return [*headers, folder / "shim.cpp"]


def gruyere_h() -> Path:
    """gruyere.h: beside the source in an installed package, in include/ in a clone of the
    repository."""
    installed = _SOURCES / "gruyere.h"
    return installed if installed.is_file() else _HERE.parents[2] / "include" / "gruyere.h"


def _include_of(torch: Any) -> Path:
    return Path(torch.__file__).parent / "include"


def _digest(*parts: Union[str, bytes]) -> str:
    whole = hashlib.sha256()
    for part in parts:
        # Independent of the locale's encoding of files.
        content = part.encode() if isinstance(part, str) else part
        whole.update(b"%d:%b" % (len(content), content))
    return whole.hexdigest()[:24]
