"""The stand-in GPU: one library that replaces the driver and every NVIDIA library that torch is
linked with, so that a GPU program runs on a machine without a GPU.

    from gruyere import _stand_in
    with _stand_in.Owner(folder) as owner:
        subprocess.run(["python", "train.py"], env={**os.environ, **_stand_in.environment(owner)})

or by hand: python -m gruyere._stand_in python train.py

The wheel includes it. It needs Linux and a torch built for CUDA, but no driver and none of the
nvidia-* packages.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Optional

from ._errors import GruyereError, say

VARIABLE = "GRUYERE_PHANTOM"
LIBRARY = "libphantom_cuda.so"
# The stand-in reads these (crates/phantom/abi/src/owner.rs).
OWNER = "PHANTOM_OWNER"
DRYRUN = "PHANTOM_DRYRUN"
DEV_FOLDER = "PHANTOM_DEV_FOLDER"
# And this one (crates/phantom/abi/src/cudnn.rs).
CUDNN = "PHANTOM_CUDNN"
# And these (crates/phantom/abi/src/gpu.rs).
VALUES = "PHANTOM_VALUES"
CONTENTS = "PHANTOM_CONTENTS"
# A function that only the stand-in has.
SYMBOL = "phantom_physical"
# The names of a real driver's device files in /dev.
DEVICE_FILES = ("nvidiactl", "nvidia0", "nvidia-uvm", "nvidia-caps", "nvhost-gpu")

# Every NVIDIA library that a torch for CUDA 13 or CUDA 12 links or opens, including libcuda and
# NVML. The suite of PyTorch's own tests links the same names.
NAMES = """libcuda.so.1
    libcudart.so.13 libcublas.so.13 libcublasLt.so.13 libcufft.so.12 libcupti.so.13
    libcusolver.so.12 libnvrtc.so.13 libnvJitLink.so.13
    libcudart.so.12 libcublas.so.12 libcublasLt.so.12 libcufft.so.11 libcupti.so.12
    libcusolver.so.11 libnvrtc.so.12 libnvJitLink.so.12 libnvToolsExt.so.1
    libcudnn.so.9 libcufile.so.0 libcurand.so.10 libcusparse.so.12 libcusparseLt.so.0 libnccl.so.2
    libnvshmem_host.so.3 libnvidia-ml.so.1""".split()

# Characters that a path in LD_PRELOAD or LD_LIBRARY_PATH cannot contain: they end the path, or
# begin a token that the dynamic loader replaces.
_ENDS = re.compile(r"[\s:;$]")
# How to get a torch built for CUDA.
_REMEDY = (
    "install a torch built for CUDA, for Linux on x86-64 or aarch64: pip install torch --index-url "
    "https://download.pytorch.org/whl/cu130 (it needs neither a GPU nor a driver)"
)


class Owner:
    """Holds the lock that processes need to run on the stand-in. A process that outlives the lock
    is ended when it first uses CUDA.

    The lock file is in `folder`, which must be private to us and must be the same folder for those
    processes: a lock on another layer of an overlay is a different lock. The kernel releases the
    lock when this process ends, however it ends; a forked child does not hold it.
    """

    def __init__(self, folder: Path) -> None:
        # Windows has neither such locks nor a stand-in, but must be able to import the package.
        import fcntl

        with open("/proc/self/stat") as stat:
            # The 22nd field. The second one, a name in parentheses, may contain anything.
            start = stat.read().rpartition(")")[2].split()[22 - 3]
        self.file = Path(folder).absolute() / "owner"
        # Nothing else in this process may open the file: closing it would release the lock.
        self._descriptor: Optional[int] = os.open(
            self.file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644
        )
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(self._descriptor, f"{os.getpid()} {start}\n".encode())
        except OSError:
            self.close()
            raise

    def environment(self) -> dict[str, str]:
        """The environment variable that names the lock file for the stand-in."""
        return {OWNER: str(self.file)}

    def close(self) -> None:
        """Release the lock. A process that first uses CUDA after that is ended."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
            with contextlib.suppress(OSError):
                self.file.unlink()

    def __enter__(self) -> Owner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def real_driver() -> Optional[Path]:
    """A device file of a real driver, or None. On a machine with a real driver the stand-in serves
    only dry runs."""
    for folder in ("/dev", os.environ.get(DEV_FOLDER)):
        for name in DEVICE_FILES if folder else ():
            file = Path(folder or "", name)
            if os.path.lexists(file):
                return file
    return None


def is_device() -> bool:
    """Whether this process's CUDA is the stand-in. Looks for a symbol, because library names prove
    nothing; loads no library."""
    process = ctypes.CDLL(None)
    if hasattr(process, SYMBOL):
        return True
    try:
        driver = ctypes.CDLL("libcuda.so.1", os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return False
    return hasattr(driver, SYMBOL)


def library(beside: Optional[str] = None) -> Optional[Path]:
    """The stand-in's file: $GRUYERE_PHANTOM, else the one in the folder `beside`, else the one
    installed with this package. None if there is none.

    Raises GruyereError if $GRUYERE_PHANTOM is not a file.
    """
    chosen = os.environ.get(VARIABLE)
    if chosen:
        if not Path(chosen).is_file():
            raise GruyereError(
                f"{VARIABLE}={chosen}: no such file; set it to the path of {LIBRARY}, or unset "
                f"{VARIABLE}"
            )
        return Path(chosen).absolute()
    folders = [Path(beside)] if beside else []
    for folder in (*folders, Path(__file__).parent):
        if (folder / LIBRARY).is_file():
            return (folder / LIBRARY).absolute()
    return None


def check_torch(platform: str = sys.platform) -> None:
    """Raise GruyereError if this interpreter has a torch that cannot use the stand-in. Does not
    import torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return
    folder = Path(spec.origin).parent
    if platform != "linux":
        raise GruyereError(
            f"the stand-in GPU needs Linux, and this is {platform}: use a Linux container or "
            f"virtual machine, and there {_REMEDY}"
        )
    if not (folder / "lib" / "libtorch_cuda.so").exists():
        said = re.search(r"^__version__ = '([^']*)'", _text(folder / "version.py"), re.MULTILINE)
        version = f"torch {said[1]}" if said else "the torch"
        raise GruyereError(
            f"{version} in {folder} is not built for CUDA, so it never uses a GPU: {_REMEDY}"
        )


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def link(stand_in: Path, folder: Path) -> None:
    """Link the stand-in into `folder` under each name."""
    for name in NAMES:
        (folder / name).symlink_to(stand_in)


def links(stand_in: Path) -> Path:
    """A folder in the user's cache that has the stand-in under each name, created if missing. If no
    cache is writable, it is created in the folder for temporary files."""
    parts = "\n".join([str(stand_in), *NAMES]).encode()
    # The folder for temporary files is that of all users.
    name = f"stand-in-{os.getuid()}-{hashlib.sha256(parts).hexdigest()[:16]}"
    for cache in _caches():
        if _ENDS.search(str(cache)):
            continue
        folder = cache / name
        if _ours(folder):
            return folder
        with contextlib.suppress(OSError):
            cache.mkdir(parents=True, exist_ok=True)
            # Atomically: another process may be creating the same folder.
            part = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=cache))
            link(stand_in, part)
            with contextlib.suppress(OSError):
                part.rename(folder)
                return folder
            for made in (*part.iterdir(), part):
                made.rmdir() if made is part else made.unlink()
            if _ours(folder):
                return folder
    raise GruyereError(
        "there is no folder for the stand-in GPU's links: set XDG_CACHE_HOME to a writable folder"
    )


def _ours(folder: Path) -> bool:
    """Whether the folder exists and belongs to this user, so that its contents can be trusted."""
    return folder.is_dir() and folder.stat().st_uid == os.getuid()


def _caches() -> list[Path]:
    """The folders in which links may be stored, best first."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    found = [Path(chosen)] if Path(chosen).is_absolute() else []
    with contextlib.suppress(RuntimeError):
        found.append(Path.home() / ".cache")
    return [*(folder / "gruyere" for folder in found), Path(temporary())]


def temporary() -> str:
    """The folder for temporary folders with the stand-in's links: the default one, unless its path
    cannot be passed to the dynamic loader."""
    usual = tempfile.gettempdir()
    for folder in (usual, "/tmp", "/var/tmp", "/dev/shm"):
        if not _ENDS.search(folder) and os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise GruyereError(
        f"TMPDIR={usual}: the dynamic loader cannot handle a path with a space, a colon, a "
        "semicolon or a dollar sign, and neither /tmp nor /var/tmp is writable; set TMPDIR to "
        "another folder"
    )


def environment(owner: Owner) -> dict[str, str]:
    """The environment variables, in addition to ours, that a process needs to run on the stand-in
    while `owner` lives.

    Raises GruyereError if there is no stand-in or torch cannot use it.
    """
    stand_in = library()
    if stand_in is None:
        raise GruyereError(f"the stand-in GPU was not found. {MISSING}")
    check_torch()
    return loaded_from(stand_in, links(stand_in), owner)


def loaded_from(stand_in: Path, folder: Path, owner: Owner) -> dict[str, str]:
    """Like `environment`, for a stand-in linked into `folder`. Does not check torch."""
    where, found = str(folder), os.environ.get("LD_LIBRARY_PATH")
    preloaded = os.environ.get("LD_PRELOAD", "")
    if _ENDS.search(str(stand_in)):
        # The dynamic loader recognises the file by any link to it.
        stand_in = folder / NAMES[0]
    return {
        **owner.environment(),
        **_cudnn_version(),
        "LD_PRELOAD": preloaded
        if str(stand_in) in preloaded
        else ":".join(filter(None, [str(stand_in), preloaded])),
        "LD_LIBRARY_PATH": f"{where}:{found}" if found else where,
    }


def values() -> dict[str, str]:
    """The environment variable by which what a kernel would have written reads as zeros, and not as
    what its memory had before: a count, which torch then allocates. Empty where memory's contents
    are kept for a test, and have values of their own."""
    return {} if CONTENTS in os.environ else {VALUES: os.environ.get(VALUES, "zeros")}


def _cudnn_version() -> dict[str, str]:
    """The environment variable with the version of cuDNN that the installed torch was built with:
    torch refuses an older one. Empty if torch's metadata does not name it.
    """
    try:
        required = importlib.metadata.requires("torch") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    for requirement in required:
        found = re.match(r"nvidia-cudnn-cu\d+\s*==\s*(\d+\.\d+\.\d+)", requirement)
        if found and CUDNN not in os.environ:
            return {CUDNN: found[1]}
    return {}


# The remedy if the stand-in was not found.
MISSING = (
    "It comes with Gruyère's wheel; in the source tree, build it (cargo build --release -p "
    f"gruyere-phantom-abi) and set {VARIABLE}=target/release/{LIBRARY}"
)


_USAGE = """usage: python -m gruyere._stand_in COMMAND [ARGUMENT ...]

Runs a command on the stand-in GPU, which accounts for memory and computes nothing. For developers
of Gruyère. Processes that the command leaves running are ended when they first use CUDA after
that."""


def main(words: list[str]) -> int:
    """Run a command on the stand-in, holding the lock. Returns its exit code."""
    if not words or words[0].startswith("-"):
        say(_USAGE)
        return 0 if words[:1] in (["-h"], ["--help"]) else 2
    try:
        with tempfile.TemporaryDirectory(prefix="gruyere-stand-in.") as folder:
            with Owner(Path(folder)) as owner:
                return _run(words, {**os.environ, **values(), **environment(owner)})
    except GruyereError as error:
        say(f"gruyere: {error}")
        return 2
    except OSError as error:
        say(f"gruyere: {words[0]}: {error.strerror}")
        return 127


def _run(words: list[str], environment: dict[str, str]) -> int:
    """Run a command and wait for it. Returns its exit code as a shell reports it. Signals that end
    a process are left to the command: a terminal sends them to both processes."""
    for number in (signal.SIGINT, signal.SIGQUIT):
        # What is ignored here, as under `nohup`, stays ignored in the command too.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    process = subprocess.Popen(words, env=environment)
    signal.signal(signal.SIGTERM, lambda number, _: process.send_signal(number))
    code = process.wait()
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
