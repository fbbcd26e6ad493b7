"""The native door's shim: a small C++ library between torch's own allocator interface and
libgruyere, built on this machine.

It has to be compiled against the headers of the torch that is installed, and fits no other. So it
is built once with the machine's C++ compiler, a matter of seconds, and kept in the user's cache,
under a name made of all that it depends on. Whatever is missing is no error: the pluggable door
serves then, and one line says why.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional, Union

from . import _library

# What a compiler may take; it needs some seconds.
_PATIENCE_SECONDS = 300
# How long another process may build before this one goes on without. A build takes 12 s of a core,
# and on a node whose ranks all start at once some times that; a process that was stopped (by a
# debugger, by ^Z) never ends it, and nobody waits longer than this for an import.
_TURN_SECONDS = 60
# What a compiler says, whatever its exit code, where the machine was at fault: a full disk, or no
# memory, for which parts of it are killed.
_PASSING = (
    "no space left",
    "quota exceeded",
    "read-only file system",
    "input/output error",
    "signal terminated",
    "due to signal",
    "unable to execute command",
    "error: killed",
    "out of memory",
    "allocate memory",
    "memory exhausted",
)
_HERE = Path(__file__).resolve().parent
_loaded: Optional[ctypes.CDLL] = None


class Unavailable(Exception):
    """There is no shim here; the text says why."""


class _Refused(Unavailable):
    """The compiler has seen the source and does not take it: it will not the next time either."""


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
    global _loaded
    with _unavailable():
        wanted = key(torch)
        shim = _load(_build(torch, wanted), wanted)
    message = ctypes.create_string_buffer(4096)
    try:
        find = ctypes.cast(_library.library().gruyere_native_table, ctypes.c_void_p)
    except AttributeError as error:
        raise Unavailable(
            "this libgruyere.so is older than the native door: install gruyere again"
        ) from error
    if shim.gruyere_shim_install(find, message, ctypes.c_size_t(len(message))) != 0:
        raise Unavailable(message.value.decode(errors="replace"))
    _loaded = shim


def is_current() -> bool:
    """Whether what `install` put in place still is."""
    return _loaded is not None and bool(_loaded.gruyere_shim_is_current())


def _load(file: Path, wanted: str) -> ctypes.CDLL:
    _check_owner(file)
    try:
        shim = ctypes.CDLL(str(file))
        shim.gruyere_shim_build.restype = ctypes.c_char_p
        built_from = shim.gruyere_shim_build().decode()
    except (OSError, AttributeError) as error:
        raise Unavailable(
            f"{file} cannot be loaded ({error}); python -m gruyere --build-shim builds it anew"
        ) from error
    if built_from != wanted:
        raise Unavailable(
            f"{file} was built for another torch or gruyere; python -m gruyere --build-shim "
            "builds it anew"
        )
    return shim


def build(torch: Any, anew: bool = False) -> Path:
    """The shim's file, built where there is none (or `anew`). Raises Unavailable where it cannot be
    had."""
    return _build(torch, key(torch), anew)


def _build(torch: Any, wanted: str, anew: bool = False) -> Path:
    """As `build`, of a shim whose `key` is `wanted`."""
    with _unavailable():
        compiler, folder, name = _compiler(), cache(), f"shim-{wanted}"
        if compiler is None:
            # A node of a cluster, say, whose home another one has built it in.
            found = sorted(folder.glob(f"{name}-*.so"), key=lambda file: file.stat().st_mtime)
            if not found:
                raise Unavailable(
                    "there is no C++ compiler to build it with (Debian: apt install g++), or "
                    "name one in CXX"
                )
            return found[-1]
        file = folder / f"{name}-{_digest(*compiler)}.so"
        # It takes its name when it is whole: nobody has to be waited for.
        if file.exists() and not anew:
            return file
        # What a compiler refused without CUDA's headers it may take with them.
        failed = folder / f"{file.stem}-{_digest(*map(str, cuda_folders()))}.failed"
        with _alone(folder):
            # Of many ranks the first one builds it.
            if file.exists() and not anew:
                return file
            if failed.exists() and not anew:
                before = failed.read_text(encoding="utf-8").strip()
                raise Unavailable(f"{before} (python -m gruyere --build-shim tries again)")
            with contextlib.suppress(OSError):
                failed.unlink()
            try:
                _compile(torch, wanted, compiler[0], file)
            except _Refused as error:
                _remember(failed, str(error))
                raise
            except OSError as error:
                raise Unavailable(f"the shim could not be built in {folder}: {error}") from error
        return file


def _remember(failed: Path, why: str) -> None:
    """Writes down, whole or not at all, that a build is in vain."""
    with contextlib.suppress(OSError):
        descriptor, name = tempfile.mkstemp(prefix=".failing-", dir=failed.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as to:
                to.write(f"{why}\n")
            os.rename(name, failed)
        except OSError:
            os.unlink(name)


def key(torch: Any) -> str:
    """What a shim must have been built from to be used: this torch, its headers, this source."""
    parts = [
        torch.__version__,
        str(torch.version.git_version),
        str(torch.version.cuda),
        str(torch._C._GLIBCXX_USE_CXX11_ABI),
    ]
    try:
        return _digest(
            *parts,
            _headers(torch),
            *(file.read_bytes() for file in [*sources(), include() / "gruyere.h"]),
        )
    except OSError as error:
        raise Unavailable(
            f"{error.filename} is missing: install torch, or gruyere, again"
        ) from error


def _headers(torch: Any) -> str:
    """Of torch's headers those that the interface is in."""
    root = Path(torch.__file__).parent / "include" / "c10"
    names = [
        "core/Allocator.h",
        "core/CachingDeviceAllocator.h",
        "core/Stream.h",
        "core/impl/GPUTrace.h",
        "util/Exception.h",
    ]
    names += [
        "cuda/CUDAAllocatorConfig.h",
        "cuda/CUDACachingAllocator.h",
        "cuda/CUDAStream.h",
        "macros/Macros.h",
    ]
    return _digest(*((root / name).read_bytes() for name in names))


def sources() -> list[Path]:
    """What is compiled, and before it what it includes."""
    folder = _HERE / "native"
    headers = "calls.h checkpoint.h context.h foreign.h origin.h told.h tracked.h".split()
    return [*(folder / name for name in headers), folder / "shim.cpp"]


def include() -> Path:
    """Where gruyere.h is: beside the source in an installed package, and in a clone of the
    repository where it is written."""
    return (
        _HERE / "native"
        if (_HERE / "native" / "gruyere.h").is_file()
        else _HERE.parent.parent / "include"
    )


def _digest(*parts: Union[str, bytes]) -> str:
    whole = hashlib.sha256()
    for part in parts:
        # Whatever the locale says of files.
        content = part.encode() if isinstance(part, str) else part
        whole.update(b"%d:%b" % (len(content), content))
    return whole.hexdigest()[:24]


def cache() -> Path:
    """The user's own folder for shims, which nobody else can write to. Raises Unavailable where
    there can be none."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    # What is not absolute is to be ignored, says the specification.
    root = Path(chosen) if os.path.isabs(chosen) else Path(os.path.expanduser("~")) / ".cache"
    if not root.is_absolute():
        raise Unavailable(
            "this user has no home to keep the shim in; name an absolute folder in XDG_CACHE_HOME"
        )
    try:
        root.mkdir(parents=True, exist_ok=True)
        # Who may write to the folder above could put another in its place.
        _make_private(root / "gruyere", 0o022)
        return _make_private(root / "gruyere" / "shims", 0o077)
    except OSError as error:
        raise Unavailable(
            f"there is no folder to keep the shim in ({error}); name one that can be written "
            "in XDG_CACHE_HOME"
        ) from error


def _make_private(folder: Path, closed: int) -> Path:
    """A folder of this user's, with the bits of `closed` taken away from others."""
    folder.mkdir(mode=0o700, exist_ok=True)
    about = folder.lstat()
    if stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid() and about.st_mode & closed:
        folder.chmod(stat.S_IMODE(about.st_mode) & ~closed)
        about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & closed:
        raise Unavailable(
            f"{folder} is not a folder of this user's alone; remove it, or name another in "
            "XDG_CACHE_HOME"
        )
    return folder


def _check_owner(file: Path) -> None:
    about = file.lstat()
    if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o022:
        raise Unavailable(f"{file} is not a file that only this user can write; remove it")


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time. Where the file system knows no locks (some NFS), several may build at
    once: each renames its own into place. Raises Unavailable where another process does not come
    to an end."""
    import fcntl

    try:
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        # A home that can only be read may have the shim all the same.
        yield
        return
    try:
        until = time.monotonic() + _TURN_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise _held(folder, descriptor) from None
                time.sleep(0.05)
                continue
            except OSError:
                # No locks here.
                pass
            break
        yield
    finally:
        os.close(descriptor)


def _held(folder: Path, descriptor: int) -> Unavailable:
    """Another process keeps the lock of the folder."""
    holder = "another process"
    with contextlib.suppress(OSError, IndexError):
        about = os.fstat(descriptor)
        file = f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}:{about.st_ino}"
        for line in Path("/proc/locks").read_text().splitlines():
            # 1: FLOCK ADVISORY WRITE PID DEVICE:FILE 0 EOF. The pid is 0 in another's namespace.
            words = line.split()
            if words[1] == "FLOCK" and words[5:6] == [file] and words[4].isdigit():
                holder = f"process {words[4]}" if words[4] != "0" else holder
    return Unavailable(
        f"{holder} has been building the shim in {folder} for {_TURN_SECONDS} s and more: if it is "
        "stopped, let it go on or end it, and start again"
    )


def _compiler() -> Optional[tuple[str, str]]:
    """The C++ compiler's command, and what it says of its version."""
    chosen = os.environ.get("CXX")
    for command in [chosen] if chosen else ["c++", "g++", "clang++"]:
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise Unavailable(
                f"CXX={command} is no command ({error}): name a C++ compiler there, or nothing"
            ) from error
        if words and shutil.which(words[0]):
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                told = subprocess.run(
                    [*words, "--version"],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    timeout=60,
                    check=True,
                )
                return command, told.stdout.decode(errors="replace").partition("\n")[0]
    return None


def _compile(torch: Any, wanted: str, compiler: str, file: Path) -> None:
    """Builds under a random name, and puts the whole file in place."""
    descriptor, name = tempfile.mkstemp(prefix=".building-", suffix=".so", dir=file.parent)
    os.close(descriptor)
    try:
        command = _command(torch, wanted, compiler, name)
        # torch's libraries are found by their names, since they are loaded already: nothing of
        # where they are now is kept in the shim.
        environment = {**os.environ, "LC_ALL": "C", "LD_PRELOAD": ""}
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                timeout=_PATIENCE_SECONDS,
            )
        except subprocess.SubprocessError as error:
            raise Unavailable(f"the C++ compiler did not end: {error}") from error
        if done.returncode != 0:
            output = done.stdout.decode(errors="replace")
            is_final = 0 < done.returncode < 128 and not any(
                words in output.lower() for words in _PASSING
            )
            kind = _Refused if is_final else Unavailable
            remedy = "" if cuda_folders() else (
                ". CUDA's headers are not here: name a toolkit in CUDA_HOME, or install torch with "
                "its nvidia packages"
            )
            raise kind(
                f"this torch ({torch.__version__}) and {compiler} do not make a shim: "
                f"{_cause(output)}{remedy}"
            )
        os.chmod(name, 0o600)
        os.rename(name, file)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(name)


def _cause(output: str) -> str:
    """The line of a compiler's output that says why it failed."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next(
        (line for line in lines if "error" in line.lower()),
        lines[-1] if lines else "the compiler said nothing",
    )


def _command(torch: Any, wanted: str, compiler: str, output: str) -> list[str]:
    root = Path(torch.__file__).parent
    folders = [root / "include", *cuda_folders()]
    return [
        *shlex.split(compiler),
        *("-std=c++17", "-O2", "-fPIC", "-shared", "-w"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        f'-DGRUYERE_SHIM_BUILD="{wanted}"',
        f"-I{include()}",
        *(part for folder in folders for part in ("-isystem", str(folder))),
        str(sources()[-1]),
        *("-o", output, f"-L{root / 'lib'}", "-lc10_cuda", "-lc10"),
        # It is never unloaded: what frees memory may come last of all.
        "-Wl,-z,nodelete",
    ]


def cuda_folders() -> list[Path]:
    """Where CUDA's headers may be: in the packages that torch's wheel brings, in a toolkit, in a
    conda environment."""
    folders: list[Path] = []
    packages = importlib.util.find_spec("nvidia")
    for root in (packages.submodule_search_locations or ()) if packages else ():
        folders += sorted(Path(root).glob("*/include"))
    toolkits = [
        os.environ.get("CUDA_HOME"),
        os.environ.get("CUDA_PATH"),
        "/usr/local/cuda",
        sys.prefix,
    ]
    for toolkit in toolkits:
        if toolkit:
            folders += [Path(toolkit) / "include", *sorted(Path(toolkit).glob("targets/*/include"))]
    has_cuda = [
        folder
        for folder in folders
        if (folder / "cuda_runtime_api.h").is_file() or (folder / "crt").is_dir()
    ]
    return list(dict.fromkeys(has_cuda))
