"""`python -m gruyere --doctor`: tries Gruyère in this process and tells what it finds. torch's
side; `gruyere stat` and `gruyere ps` tell of processes that run."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any, Optional

from . import _enable, _library, _settings, _shim, _stand_in, _torch_conf
from ._errors import GruyereError, NoGpu

# The options without a GPU.
_WAYS = (
    "records and traces alone can be read, and without a GPU there are:",
    "gruyere dryrun train.py                 will it fit",
    "gruyere compare --stand-in train.py     beside torch's, on a stand-in GPU",
    "python -m gruyere --stand-in train.py   some steps of it there",
)


def examine() -> int:
    """Prints the findings; the exit code: 0 where Gruyère works here."""
    warnings.simplefilter("ignore")
    # Before importing torch, which may enable Gruyère: then our settings have it already.
    limit_is_ours = _enable.takes_limit({})
    for what, finding in _findings():
        _row(what, finding)
    reason, ways = _tried(limit_is_ours)
    print(f"{'gruyere':<22}{'works here' if reason is None else 'does not work here: ' + reason}")
    for way in ways:
        print(f"{'':<22}{way}")
    return 0 if reason is None else 1


def _row(what: str, finding: str) -> None:
    print(f"{what:<22}{finding}")


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
            f"{_library.path()}, version {(_library.library().gruyere_version() or b'').decode()}",
        )
    except GruyereError as error:
        yield "library", str(error)
    heard = (
        "is heard by this interpreter, in child processes too"
        if _hears()
        else (
            "is NOT heard by this interpreter, nor by child processes: the package is used "
            "without being installed; "
            "`pip install ./python_loader` in a clone of the repository"
        )
    )
    yield "GRUYERE_ENABLE", heard
    yield "GRUYERE_CONF", os.environ.get(_settings.VARIABLE) or "not set"
    if os.environ.get("GRUYERE_LIBRARY"):
        yield "GRUYERE_LIBRARY", os.environ["GRUYERE_LIBRARY"]


def _hears() -> bool:
    """Whether an interpreter that starts with GRUYERE_ENABLE=1 runs our start-up file."""
    question = "import sys; sys.exit('gruyere._startup' not in sys.modules)"
    environment = {**os.environ, _enable.VARIABLE: "1"}
    return (
        subprocess.run([sys.executable, "-c", question], env=environment, check=False).returncode
        == 0
    )


def _door(name: str, why: str) -> str:
    """Which door, why, and how to get the better one."""
    if name == "native":
        return f"{name} ({why}), by {_shim.file()}"
    if not why.startswith("door:"):
        version = (_library.library().gruyere_version() or b"").decode()
        return f"{name} ({why}); this is gruyere {version}"
    return (
        f"{name} ({why}); without that setting torch's own interface is taken, which has more of "
        "torch (docs/pytorch.md, The native door)"
    )


def _tell_door(torch: Any, name: str, why: str, limit_is_ours: bool) -> None:
    """Which door, and what of torch's own settings holds there."""
    _row("door", _door(name, why))
    said = _torch_conf.line(limit_is_ours, _shim.counts_rejections(torch, name))
    if said:
        _row("torch's settings", said)


def _tried(limit_is_ours: bool) -> tuple[Optional[str], tuple[str, ...]]:
    """Why Gruyère does not work here, or None, and what can be done all the same."""
    if "torch" not in sys.modules:
        return "torch cannot be imported (above): install PyTorch 2.4 or newer, built for CUDA", ()
    try:
        return _trial(limit_is_ours), ()
    except NoGpu as error:
        import torch

        settings = os.environ.get(_settings.VARIABLE, "")
        _tell_door(torch, *_enable.open_door(torch, settings), limit_is_ours)
        return str(error), _WAYS


def _trial(limit_is_ours: bool) -> Optional[str]:
    """Enables Gruyère, allocates on each device, and asks the library about it: why that fails, or
    None. Raises NoGpu where there is none."""
    try:
        _enable.enable()
        import torch

        found = _enable.door()
        if found:
            _tell_door(torch, *found, limit_is_ours)

        if torch.cuda.device_count() == 0:
            return (
                "libcuda is there, and it shows no device; see `nvidia-smi`, "
                "CUDA_VISIBLE_DEVICES and the container's devices "
                "(docker run --gpus all)"
            )
        if _stand_in.is_device():
            print(
                f"{'device':<22}the stand-in GPU, which keeps books of memory and computes "
                "nothing; for a real GPU: unset LD_PRELOAD LD_LIBRARY_PATH"
            )
        for device in range(torch.cuda.device_count()):
            block = torch.empty(1 << 20, dtype=torch.uint8, device=f"cuda:{device}")
            block.record_stream(torch.cuda.current_stream(device))
            print(
                f"{f'cuda:{device}':<22}{torch.cuda.get_device_name(device)}, a tensor at "
                f"{block.data_ptr():#x}"
            )
            if not block.data_ptr():
                return (
                    f"an allocation on cuda:{device} was answered with NULL; the log above says why"
                )
        torch.cuda.empty_cache()
    except NoGpu:
        raise
    except (GruyereError, RuntimeError) as error:
        return str(error)
    return None
