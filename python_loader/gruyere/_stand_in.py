"""The stand-in GPU: one library that takes the place of the driver and of every library of NVIDIA's
that torch is linked with, so that a program written for a GPU runs where there is none.

    from gruyere import _stand_in
    subprocess.run(["python", "train.py"], env={**os.environ, **_stand_in.environment()})

It is in the wheel. What is needed besides is torch built for CUDA, on Linux; no driver, and none of
the nvidia-* packages.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Optional

from ._errors import GruyereError

VARIABLE = "GRUYERE_PHANTOM"
LIBRARY = "libphantom_cuda.so"

# Every library of NVIDIA's that a torch of CUDA 13 or CUDA 12 links or opens, libcuda and NVML too.
# Torch's own tests link the same names.
NAMES = """libcuda.so.1
    libcudart.so.13 libcublas.so.13 libcublasLt.so.13 libcufft.so.12 libcupti.so.13
    libcusolver.so.12 libnvrtc.so.13 libnvJitLink.so.13
    libcudart.so.12 libcublas.so.12 libcublasLt.so.12 libcufft.so.11 libcupti.so.12
    libcusolver.so.11 libnvrtc.so.12 libnvJitLink.so.12 libnvToolsExt.so.1
    libcudnn.so.9 libcufile.so.0 libcurand.so.10 libcusparse.so.12 libcusparseLt.so.0 libnccl.so.2
    libnvshmem_host.so.3 libnvidia-ml.so.1""".split()

# What no path may have that the loader of libraries is told: LD_PRELOAD ends at it, or
# LD_LIBRARY_PATH does, or it begins a name that the loader replaces.
_ENDS = re.compile(r"[\s:;$]")
# How torch comes to be built for CUDA.
_REMEDY = (
    "install one that is, for Linux on x86-64 or aarch64: pip install torch --index-url "
    "https://download.pytorch.org/whl/cu130 (no GPU and no driver is needed)"
)


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
            # Whole or not at all: another process may be making it too, and then has made the
            # same.
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


def environment() -> dict[str, str]:
    """What a process needs in its environment to run on the stand-in, beside what is in ours.

    Raises GruyereError where there is no stand-in, or torch cannot use it.
    """
    stand_in = library()
    if stand_in is None:
        raise GruyereError(f"the stand-in GPU was not found. {MISSING}")
    check_torch()
    return loaded_from(stand_in, links(stand_in))


def loaded_from(stand_in: Path, folder: Path) -> dict[str, str]:
    """The same for a stand-in under its names in `folder`, whatever torch there is."""
    where, found = str(folder), os.environ.get("LD_LIBRARY_PATH")
    preloaded = os.environ.get("LD_PRELOAD", "")
    if _ENDS.search(str(stand_in)):
        # The loader knows the file itself, by whichever link it comes.
        stand_in = folder / NAMES[0]
    return {
        "LD_PRELOAD": preloaded
        if str(stand_in) in preloaded
        else ":".join(filter(None, [str(stand_in), preloaded])),
        "LD_LIBRARY_PATH": f"{where}:{found}" if found else where,
    }


# What helps where it was not found.
MISSING = (
    "It comes with Gruyère's wheel; in the source tree build it (cargo build --release -p "
    f"gruyere-phantom-abi) and name it: {VARIABLE}=target/release/{LIBRARY}"
)
