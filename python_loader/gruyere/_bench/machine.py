"""The machine on which the programs run: a real GPU or the stand-in GPU."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Optional

from .. import _stand_in
from .._errors import GruyereError

# Default times on the stand-in's clock: 20 us per kernel, 8 us of host time per launch. So the
# device lags behind the host, and memory that another stream has used is not free at once.
_CLOCK = {"PHANTOM_KERNEL_NS": "20000", "PHANTOM_COSTS": "launches"}


def gpu() -> str:
    """The name of the first GPU. Loads the driver into this process, but creates no context.

    Raises GruyereError with the cause if there is no usable GPU.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise _no_gpu(f"there is no NVIDIA driver ({error})") from error
    # Also if the stand-in is preloaded: torch would use it in place of any driver.
    if _stand_in.is_device():
        raise _no_gpu("the driver in this environment is that of the stand-in GPU")
    count, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    for call, arguments in (
        ("cuInit", (0,)),
        ("cuDeviceGetCount", (ctypes.byref(count),)),
        ("cuDeviceGetName", (name, len(name), 0)),
    ):
        code = getattr(driver, call)(*arguments)
        if code != 0:
            raise _no_gpu(f"the driver's {call} returned {_error(driver, code)}")
        if call == "cuDeviceGetCount" and count.value == 0:
            raise _no_gpu("the driver shows no device to this process")
    return name.value.decode(errors="replace")


def _error(driver: ctypes.CDLL, code: int) -> str:
    """An error code of the driver, with its name if it has one."""
    name = ctypes.c_char_p()
    if hasattr(driver, "cuGetErrorName"):
        driver.cuGetErrorName(code, ctypes.byref(name))
    return f"{code} ({name.value.decode(errors='replace')})" if name.value else str(code)


def _no_gpu(cause: str) -> GruyereError:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = "" if visible is None else f"; CUDA_VISIBLE_DEVICES is {visible!r}"
    return GruyereError(
        f"no GPU can be used here: {cause}{hidden}\n"
        "--stand-in runs this on the stand-in GPU, which accounts for memory and computes "
        "nothing.\n"
        "`gruyere dryrun train.py` shows which GPU a program would fit on."
    )


def check_alone() -> None:
    """Raise GruyereError on a machine with a real driver, where the stand-in serves only dry
    runs."""
    file = _stand_in.real_driver()
    if file is not None:
        raise GruyereError(
            f"--stand-in: this machine has a real GPU's driver ({file}), and there only `gruyere "
            "dryrun` may use the stand-in: leave --stand-in out"
        )


class Machine:
    """A real GPU or the stand-in."""

    def __init__(self, name: str, environment: dict[str, str]) -> None:
        self.name = name
        self.environment = environment
        """The environment variables that a process needs to run there."""

    @property
    def is_stand_in(self) -> bool:
        return bool(self.environment)


def _lag(nanoseconds: str) -> str:
    """How far the device lags behind the host, as text. The stand-in refuses a value that is not a
    number."""
    try:
        microseconds = int(nanoseconds) / 1000
    except ValueError:
        return f"kernels of {nanoseconds!r} ns"
    return f"kernels of {microseconds:g} us" if microseconds else "done at once"


def choose(stand_in: bool, beside: Optional[str], folder: Path) -> Machine:
    """The stand-in if it is requested, else a real GPU. `beside`: a folder in which to look for the
    stand-in. `folder`: our folder for the links and for the lock, which this process holds until it
    ends; no overlay may cover it (`_stand_in.Owner`).

    Raises GruyereError if the requested one is not available.
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
            **_stand_in.values(),
            **_stand_in.loaded_from(library, links, _stand_in.Owner(folder)),
        },
    )
