"""On what the programs run: a real GPU, or the stand-in for one."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Optional

from .. import _stand_in
from .._errors import GruyereError

# Times on the stand-in's clock, unless the user sets them: kernels of 20 us, 8 us of host a launch.
# So a device lags behind its host, and memory that another stream has used is not free at once.
_CLOCK = {"PHANTOM_KERNEL_NS": "20000", "PHANTOM_COSTS": "launches"}


def gpu() -> str:
    """The name of the first GPU. Loads the driver into this process, and makes no context.

    Raises GruyereError with the cause where there is none that can be used.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise _no_gpu(f"there is no NVIDIA driver ({error})") from error
    # A preloaded one too: torch would take it, whatever driver there is.
    if _stand_in.is_device():
        raise _no_gpu("the driver of this environment is the stand-in for one")
    count, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    for call, arguments in (
        ("cuInit", (0,)),
        ("cuDeviceGetCount", (ctypes.byref(count),)),
        ("cuDeviceGetName", (name, len(name), 0)),
    ):
        code = getattr(driver, call)(*arguments)
        if code != 0:
            raise _no_gpu(f"{call} of the driver answered {_error(driver, code)}")
        if call == "cuDeviceGetCount" and count.value == 0:
            raise _no_gpu("the driver shows no device to this process")
    return name.value.decode(errors="replace")


def _error(driver: ctypes.CDLL, code: int) -> str:
    """A code of the driver's, with its name where it has one."""
    name = ctypes.c_char_p()
    if hasattr(driver, "cuGetErrorName"):
        driver.cuGetErrorName(code, ctypes.byref(name))
    return f"{code} ({name.value.decode(errors='replace')})" if name.value else str(code)


def _no_gpu(cause: str) -> GruyereError:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = "" if visible is None else f"; CUDA_VISIBLE_DEVICES is {visible!r}"
    return GruyereError(
        f"no GPU can be used here: {cause}{hidden}\n"
        "--stand-in runs this on the stand-in GPU, which keeps books of memory and computes "
        "nothing.\n"
        "`gruyere dryrun train.py` tells which GPU a program would fit on."
    )


def check_alone() -> None:
    """Raises GruyereError where a real driver is here, beside which the stand-in serves dry runs
    alone."""
    file = _stand_in.real_driver()
    if file is not None:
        raise GruyereError(
            f"--stand-in: this machine has a real GPU's driver ({file}), beside which only "
            "`gruyere dryrun` uses the stand-in: leave --stand-in out"
        )


class Machine:
    """Where the programs run."""

    def __init__(self, name: str, environment: dict[str, str]) -> None:
        self.name = name
        self.environment = environment
        """What a process needs to run there."""

    @property
    def is_stand_in(self) -> bool:
        return bool(self.environment)


def _lag(nanoseconds: str) -> str:
    """How far the device lags behind its host. What is no number, the stand-in refuses."""
    try:
        microseconds = int(nanoseconds) / 1000
    except ValueError:
        return f"kernels of {nanoseconds!r} ns"
    return f"kernels of {microseconds:g} us" if microseconds else "done at once"


def choose(stand_in: bool, beside: Optional[str], folder: Path) -> Machine:
    """The stand-in where it is asked for, else a real GPU. `beside`: a folder in which the stand-in
    may be. `folder`: of ours, for links and the lock, which this process holds until it ends; no
    overlay may be over it (`_stand_in.Owner`).

    Raises GruyereError where there is not what is asked for.
    """
    if not stand_in:
        return Machine(gpu(), {})
    library = _stand_in.library(beside)
    if library is None:
        raise GruyereError(f"the stand-in GPU was not found. {_stand_in.MISSING}")
    links = folder / "libraries"
    links.mkdir()
    _stand_in.link(library, links)
    clock = {key: os.environ.get(key, value) for key, value in _CLOCK.items()}
    memory = os.environ.get("PHANTOM_MEMORY", "80GiB")
    return Machine(
        f"stand-in GPU, {memory}, {_lag(clock['PHANTOM_KERNEL_NS'])}",
        {
            **clock,
            **_stand_in.loaded_from(library, links, _stand_in.Owner(folder)),
        },
    )
