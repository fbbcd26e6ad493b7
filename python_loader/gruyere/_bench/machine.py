"""On what the programs run: a real GPU, or the stand-in for one."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Optional

from .. import _stand_in
from .._errors import GruyereError

# What takes time on the stand-in's clock, where the user has said nothing: kernels of 20 us, 8 us
# of host a launch. So a device lags behind its host, and memory that another stream has used is not
# free at once.
_CLOCK = {"PHANTOM_KERNEL_NS": "20000", "PHANTOM_COSTS": "launches"}


def gpu() -> Optional[str]:
    """The name of the first GPU; None where there is none. Loads the driver into this process, and
    makes no context."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    if (
        driver.cuInit(0) != 0
        or driver.cuDeviceGetCount(ctypes.byref(count)) != 0
        or count.value == 0
    ):
        return None
    driver.cuDeviceGetName(name, len(name), 0)
    return name.value.decode(errors="replace")


class Machine:
    """Where the programs run."""

    def __init__(self, name: str, environment: dict[str, str]) -> None:
        self.name = name
        self.environment = environment
        """What a process needs to run there."""

    @property
    def is_stand_in(self) -> bool:
        return bool(self.environment)


def choose(phantom: bool, beside: Optional[str], folder: Path) -> Machine:
    """A real GPU where there is one and `phantom` does not forbid it, else the stand-in. `beside`:
    a folder in which it may be. `folder`: of ours, for links.

    Raises GruyereError where there is neither.
    """
    if not phantom:
        name = gpu()
        if name is not None:
            return Machine(name, {})
    library = _stand_in.library(beside)
    if library is None:
        problem = (
            "the stand-in GPU was not found"
            if phantom
            else (
                "there is no GPU here (no NVIDIA driver, or it shows no device), and no "
                "stand-in for one"
            )
        )
        raise GruyereError(f"{problem}. {_stand_in.MISSING}")
    _stand_in.link(library, folder)
    return Machine(
        f"stand-in GPU, {os.environ.get('PHANTOM_MEMORY', '80GiB')}",
        {
            **{key: os.environ.get(key, value) for key, value in _CLOCK.items()},
            **_stand_in.loaded_from(library, folder),
        },
    )
