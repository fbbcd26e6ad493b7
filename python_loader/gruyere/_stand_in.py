"""The stand-in GPU: one library that takes the place of the driver and of every library of NVIDIA's
that torch is linked with, so that a program written for a GPU runs where there is none.

    from gruyere import _stand_in
    with _stand_in.Owner(folder) as owner:
        subprocess.run(["python", "train.py"], env={**os.environ, **_stand_in.environment(owner)})

or by hand: python -m gruyere._stand_in python train.py

It is in the wheel. What is needed besides is torch built for CUDA, on Linux; no driver, and none of
the nvidia-* packages.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Optional

from ._errors import GruyereError

VARIABLE = "GRUYERE_PHANTOM"
LIBRARY = "libphantom_cuda.so"
# The stand-in reads these (crates/phantom/abi/src/owner.rs).
OWNER = "PHANTOM_OWNER"
DRYRUN = "PHANTOM_DRYRUN"
DEV_FOLDER = "PHANTOM_DEV_FOLDER"
# A function that no other library has.
SYMBOL = "phantom_physical"
# The names of a real driver's files in /dev.
DEVICE_FILES = ("nvidiactl", "nvidia0", "nvidia-uvm", "nvidia-caps", "nvhost-gpu")

# Every library of NVIDIA's that a torch of CUDA 13 or CUDA 12 links or opens, libcuda and NVML too.
# Torch's own tests link the same names.
NAMES = """libcuda.so.1
    libcudart.so.13 libcublas.so.13 libcublasLt.so.13 libcufft.so.12 libcupti.so.13
    libcusolver.so.12 libnvrtc.so.13 libnvJitLink.so.13
    libcudart.so.12 libcublas.so.12 libcublasLt.so.12 libcufft.so.11 libcupti.so.12
    libcusolver.so.11 libnvrtc.so.12 libnvJitLink.so.12 libnvToolsExt.so.1
    libcudnn.so.9 libcufile.so.0 libcurand.so.10 libcusparse.so.12 libcusparseLt.so.0 libnccl.so.2
    libnvshmem_host.so.3 libnvidia-ml.so.1""".split()

# Characters that no path for the loader of libraries may have: LD_PRELOAD or LD_LIBRARY_PATH ends
# there, or a name begins that the loader replaces.
_ENDS = re.compile(r"[\s:;$]")
# The way to a torch built for CUDA.
_REMEDY = (
    "install one that is, for Linux on x86-64 or aarch64: pip install torch --index-url "
    "https://download.pytorch.org/whl/cu130 (no GPU and no driver is needed)"
)


class Owner:
    """Holds the lock without which nobody runs on the stand-in, for as long as this process may
    have processes there. Whatever outlives it is ended when it first uses CUDA.

    The file is in `folder`, which is to be one of ours alone, that the processes see as we do: a
    lock on another layer of an overlay is not the same. The kernel frees the lock when this process
    ends, however it ends; a child that was forked does not hold it.
    """

    def __init__(self, folder: Path) -> None:
        # Windows has no such locks, and no stand-in; yet it must import the package.
        import fcntl

        with open("/proc/self/stat") as stat:
            # The 22nd field; the second, a name in parentheses, may hold anything.
            start = stat.read().rpartition(")")[2].split()[22 - 3]
        self.file = Path(folder).absolute() / "owner"
        # Nothing else in this process may open the file: closing it would give up the lock.
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
        """What tells the stand-in of the lock."""
        return {OWNER: str(self.file)}

    def close(self) -> None:
        """Gives the lock up: who uses CUDA for the first time after that is ended."""
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
    """A device file of a real driver's, beside which the stand-in serves dry runs alone; None where
    there is none."""
    for folder in ("/dev", os.environ.get(DEV_FOLDER)):
        for name in DEVICE_FILES if folder else ():
            file = Path(folder or "", name)
            if os.path.lexists(file):
                return file
    return None


def is_device() -> bool:
    """Whether the CUDA of this process is the stand-in. Asks the library, since names can be
    anything; loads none."""
    process = ctypes.CDLL(None)
    if hasattr(process, SYMBOL):
        return True
    try:
        driver = ctypes.CDLL("libcuda.so.1", os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return False
    return hasattr(driver, SYMBOL)


def library(beside: Optional[str] = None) -> Optional[Path]:
    """The stand-in's file: $GRUYERE_PHANTOM, else the one in the folder `beside`, else the one that
    was installed with this package. None where there is none.

    Raises GruyereError where $GRUYERE_PHANTOM names no file.
    """
    chosen = os.environ.get(VARIABLE)
    if chosen:
        if not Path(chosen).is_file():
            raise GruyereError(
                f"{VARIABLE}={chosen}: no such file; name {LIBRARY} there, or unset {VARIABLE}"
            )
        return Path(chosen).absolute()
    folders = [Path(beside)] if beside else []
    for folder in (*folders, Path(__file__).parent):
        if (folder / LIBRARY).is_file():
            return (folder / LIBRARY).absolute()
    return None


def check_torch(platform: str = sys.platform) -> None:
    """Raises GruyereError where the torch of this interpreter is there and cannot use the stand-in.
    Does not import it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return
    folder = Path(spec.origin).parent
    if platform != "linux":
        raise GruyereError(
            f"the stand-in GPU needs Linux, and this is {platform}: run this in a container or a "
            f"virtual machine of Linux, and there {_REMEDY}"
        )
    if not (folder / "lib" / "libtorch_cuda.so").exists():
        said = re.search(r"^__version__ = '([^']*)'", _text(folder / "version.py"), re.MULTILINE)
        version = f"torch {said[1]}" if said else "the torch"
        raise GruyereError(
            f"{version} in {folder} is not built for CUDA, so it never asks for a GPU: {_REMEDY}"
        )


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def link(stand_in: Path, folder: Path) -> None:
    """Makes `folder` one that has the stand-in under each name."""
    for name in NAMES:
        (folder / name).symlink_to(stand_in)


def links(stand_in: Path) -> Path:
    """A folder of the user's cache that has the stand-in under each name; made where it is not
    there. Without a cache that can be written to it is made in the folder for temporary files."""
    parts = "\n".join([str(stand_in), *NAMES]).encode()
    name = f"stand-in-{hashlib.sha256(parts).hexdigest()[:16]}"
    for cache in _caches():
        if _ENDS.search(str(cache)):
            continue
        folder = cache / name
        if _ours(folder):
            return folder
        with contextlib.suppress(OSError):
            cache.mkdir(parents=True, exist_ok=True)
            # Whole or not at all: another process may be making the same.
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
        "there is no folder to keep the stand-in GPU's links in: name one that can be written to "
        "in XDG_CACHE_HOME"
    )


def _ours(folder: Path) -> bool:
    """Whether it is there, and nobody else can have put anything into it."""
    return folder.is_dir() and folder.stat().st_uid == os.getuid()


def _caches() -> list[Path]:
    """Where links may be kept, the best first."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    found = [Path(chosen)] if Path(chosen).is_absolute() else []
    with contextlib.suppress(RuntimeError):
        found.append(Path.home() / ".cache")
    return [*(folder / "gruyere" for folder in found), Path(temporary())]


def temporary() -> str:
    """Where folders for temporary files may be that have the stand-in's names: the usual one,
    unless the loader of libraries can't be told of its path."""
    usual = tempfile.gettempdir()
    for folder in (usual, "/tmp", "/var/tmp", "/dev/shm"):
        if not _ENDS.search(folder) and os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise GruyereError(
        f"TMPDIR={usual}: the loader of libraries can't be told of a path with a blank, a colon, a "
        "semicolon or a dollar sign, and neither /tmp nor /var/tmp can be written to; name another "
        "folder in TMPDIR"
    )


def environment(owner: Owner) -> dict[str, str]:
    """What a process needs in its environment to run on the stand-in, beside what is in ours, for
    as long as `owner` lives.

    Raises GruyereError where there is no stand-in, or torch cannot use it.
    """
    stand_in = library()
    if stand_in is None:
        raise GruyereError(f"the stand-in GPU was not found. {MISSING}")
    check_torch()
    return loaded_from(stand_in, links(stand_in), owner)


def loaded_from(stand_in: Path, folder: Path, owner: Owner) -> dict[str, str]:
    """The same for a stand-in under its names in `folder`, whatever torch there is."""
    where, found = str(folder), os.environ.get("LD_LIBRARY_PATH")
    preloaded = os.environ.get("LD_PRELOAD", "")
    if _ENDS.search(str(stand_in)):
        # The loader knows the file itself, by any link.
        stand_in = folder / NAMES[0]
    return {
        **owner.environment(),
        "LD_PRELOAD": preloaded
        if str(stand_in) in preloaded
        else ":".join(filter(None, [str(stand_in), preloaded])),
        "LD_LIBRARY_PATH": f"{where}:{found}" if found else where,
    }


# The remedy if it was not found.
MISSING = (
    "It comes with Gruyère's wheel; in the source tree build it (cargo build --release -p "
    f"gruyere-phantom-abi) and name it: {VARIABLE}=target/release/{LIBRARY}"
)


_USAGE = """usage: python -m gruyere._stand_in COMMAND [ARGUMENT ...]

Runs a command on the stand-in GPU, which keeps books of memory and computes nothing, for people who
work on Gruyère. What the command leaves running is ended when it first uses CUDA after that."""


def main(words: list[str]) -> int:
    """Runs a command on the stand-in, holding the lock; its exit code."""
    if not words or words[0].startswith("-"):
        print(_USAGE, file=sys.stderr)
        return 0 if words[:1] in (["-h"], ["--help"]) else 2
    try:
        with tempfile.TemporaryDirectory(prefix="gruyere-stand-in.") as folder:
            with Owner(Path(folder)) as owner:
                return _run(words, {**os.environ, **environment(owner)})
    except GruyereError as error:
        print(f"gruyere: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"gruyere: {words[0]}: {error.strerror}", file=sys.stderr)
        return 127


def _run(words: list[str], environment: dict[str, str]) -> int:
    """Runs a command and waits for its end: its exit code as a shell tells it. Signals to end are
    the command's: a terminal sends its own to both."""
    for number in (signal.SIGINT, signal.SIGQUIT):
        # The command ignores what is ignored here, as under `nohup`.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    process = subprocess.Popen(words, env=environment)
    signal.signal(signal.SIGTERM, lambda number, _: process.send_signal(number))
    code = process.wait()
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
