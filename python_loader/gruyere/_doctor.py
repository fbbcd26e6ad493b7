"""`python -m gruyere --doctor`: checks whether Gruyère works in this process and prints the
findings on torch's side. (`gruyere stat` and `gruyere ps` report on running processes.)"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from typing import Any, Optional

from . import _enable, _stand_in
from ._errors import GruyereError, NoGpu
from ._native import conf, library, shim
from ._torch import alloc_conf

# Where the findings begin.
_BELOW = 22
# What works without a GPU, in lines that fit behind that column.
_WAYS = (
    "without a GPU, read records and traces, or run:",
    "gruyere dryrun train.py                does it fit?",
    "gruyere compare --stand-in train.py    beside torch's",
    "python -m gruyere --stand-in train.py  some steps of it",
)


def examine() -> int:
    """Print the findings. Returns the exit code: 0 if Gruyère works here."""
    warnings.simplefilter("ignore")
    # Before torch is imported: the import may enable Gruyère, and then our settings have a limit.
    limit_is_ours = _enable.takes_limit({})
    for what, finding in _findings():
        _row(what, finding)
    reason, ways = _tried(limit_is_ours)
    _row("gruyere", "works here" if reason is None else "does not work here: " + reason)
    for way in ways:
        print(f"{'':<{_BELOW}}{way}")
    return 0 if reason is None else 1


def _row(what: str, finding: str) -> None:
    head = f"{what:<{_BELOW}}"
    if not sys.stdout.isatty():
        print(head + finding)
        return
    columns = shutil.get_terminal_size().columns
    print(
        textwrap.fill(
            finding, max(columns, 2 * _BELOW), initial_indent=head,
            subsequent_indent=" " * _BELOW, break_long_words=False, break_on_hyphens=False,
        )
    )  # fmt: skip


def _findings() -> Iterator[tuple[str, str]]:
    yield "python", f"{platform.python_version()}, {sys.executable}"
    try:
        import torch

        yield (
            "torch",
            f"{torch.__version__}, CUDA {torch.version.cuda}, {os.path.dirname(torch.__file__)}",
        )
    except _enable.BROKEN as error:
        yield "torch", f"cannot be imported: {error}"
    try:
        yield (
            "library",
            f"{library.path()}, version {(library.load().gruyere_version() or b'').decode()}",
        )
    except GruyereError as error:
        yield "library", str(error)
    heard = (
        "works with this interpreter and its child processes"
        if _hears()
        else (
            "does NOT work with this interpreter and its child processes: the package is not "
            "installed; run `pip install ./python_loader` in a clone of the repository"
        )
    )
    yield "GRUYERE_ENABLE", heard
    yield "GRUYERE_CONF", os.environ.get(conf.VARIABLE) or "not set"
    if os.environ.get("GRUYERE_LIBRARY"):
        yield "GRUYERE_LIBRARY", os.environ["GRUYERE_LIBRARY"]


def _hears() -> bool:
    """Whether an interpreter started with GRUYERE_ENABLE=1 runs our start-up file."""
    question = "import sys; sys.exit('gruyere._startup' not in sys.modules)"
    environment = {**os.environ, _enable.VARIABLE: "1"}
    return (
        subprocess.run([sys.executable, "-c", question], env=environment, check=False).returncode
        == 0
    )


def _door(name: str, why: str) -> str:
    """The door, the reason for it, and how to get the native one."""
    if name == "native":
        return f"{name} ({why}), shim {shim.file()}"
    if not why.startswith("door:"):
        version = (library.load().gruyere_version() or b"").decode()
        return f"{name} ({why}); this is gruyere {version}"
    return (
        f"{name} ({why}); without that setting Gruyère uses the native door, which supports more "
        "of torch (docs/pytorch.md, The native door)"
    )


def _tell_door(torch: Any, name: str, why: str, limit_is_ours: bool) -> None:
    """Print the door, and which of torch's own settings take effect there."""
    _row("door", _door(name, why))
    said = alloc_conf.line(limit_is_ours, shim.counts_rejections(torch, name))
    if said:
        _row("torch's settings", said)


def _tried(limit_is_ours: bool) -> tuple[Optional[str], tuple[str, ...]]:
    """Why Gruyère does not work here (or None), and lines that say what works anyway."""
    if "torch" not in sys.modules:
        return "torch cannot be imported (above): install PyTorch 2.4 or newer, built for CUDA", ()
    try:
        return _trial(limit_is_ours), ()
    except NoGpu as error:
        import torch

        settings = os.environ.get(conf.VARIABLE, "")
        _tell_door(torch, *_enable.open_door(torch, settings), limit_is_ours)
        return str(error), _WAYS


def _trial(limit_is_ours: bool) -> Optional[str]:
    """Enable Gruyère and allocate on each device. Returns why that fails, or None. Raises NoGpu if
    there is no GPU."""
    try:
        _enable.enable()
        import torch

        found = _enable.door()
        if found:
            _tell_door(torch, *found, limit_is_ours)

        if torch.cuda.device_count() == 0:
            return (
                "libcuda can be loaded, but it shows no device; check `nvidia-smi`, "
                "CUDA_VISIBLE_DEVICES and the container's devices "
                "(docker run --gpus all)"
            )
        if _stand_in.is_device():
            _row(
                "device",
                "the stand-in GPU, which accounts for memory and computes nothing; for a real "
                "GPU: unset LD_PRELOAD LD_LIBRARY_PATH",
            )
        for device in range(torch.cuda.device_count()):
            block = torch.empty(1 << 20, dtype=torch.uint8, device=f"cuda:{device}")
            block.record_stream(torch.cuda.current_stream(device))
            name = torch.cuda.get_device_name(device)
            _row(f"cuda:{device}", f"{name}, a tensor at {block.data_ptr():#x}")
            if not block.data_ptr():
                return (
                    f"an allocation on cuda:{device} returned NULL; the log above says why"
                )
        torch.cuda.empty_cache()
    except NoGpu:
        raise
    except (GruyereError, RuntimeError) as error:
        return str(error)
    return None
