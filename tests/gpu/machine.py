"""What every part needs: the allocator that was asked for, what kind of machine this is, and
numbers that mean the same under each.

A part is a program of its own: `python PART.py ALLOCATOR [settings as JSON]`. Its last line on
stdout is its answer, as JSON.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
from pathlib import Path
from typing import Any, Callable, Dict, NoReturn, Optional

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# Where the Python package is: in the bundle (bundle/README.md), in the repository.
PACKAGES = (HERE.parent / "python_loader", ROOT / "python_loader")
ALLOCATORS = {
    "native": "",
    "expandable": "expandable_segments:True",
    "async": "backend:cudaMallocAsync",
    "gruyere": "",
}
MIB = 1 << 20
GIB = 1 << 30


def library_file() -> Path:
    """libgruyere.so: $GRUYERE_LIBRARY, or what `cargo build --release` has built."""
    return Path(os.environ.get("GRUYERE_LIBRARY", ROOT / "target" / "release" / "libgruyere.so"))


class Stats(ctypes.Structure):
    """GruyereStats, version 1 (include/gruyere.h). Later versions only add at the end."""

    NAMES = """total_memory limit reserved reserved_peak live live_peak pending arena_free
        largest_free slab_bytes slab_free captured retries out_of_memories bad_frees events_recorded
        events_queried""".split()
    _fields_ = [("size", ctypes.c_uint32), ("version", ctypes.c_uint32)] + [
        (name, ctypes.c_uint64) for name in NAMES
    ]


_library: Optional[ctypes.CDLL] = None


def gruyere() -> ctypes.CDLL:
    """The library, where `install("gruyere")` has put it in."""
    assert _library is not None, "Gruyère is not installed in this process"
    return _library


def gruyere_stats() -> Dict[str, int]:
    numbers = Stats(size=ctypes.sizeof(Stats))
    code = gruyere().gruyere_stats(0, ctypes.byref(numbers))
    assert code == 0, f"gruyere_stats answered {code}"
    return {name: getattr(numbers, name) for name in Stats.NAMES}


def install(allocator: str, record_stream: bool = True) -> None:
    """Puts the allocator in place; before CUDA is initialised. torch's own are chosen by the
    environment (acceptance.py sets it).

    `record_stream=False` leaves that hook out and announces it all the same: a planted fault."""
    global _library
    import torch

    if is_phantom():
        # The phantom has no cuDNN.
        torch.backends.cudnn.enabled = False
        torch.backends.cuda.enable_cudnn_sdp(False)
    if allocator != "gruyere":
        return
    os.environ["GRUYERE_LIBRARY"] = str(library_file().absolute())
    _library = ctypes.CDLL(os.environ["GRUYERE_LIBRARY"])
    if record_stream:
        sys.path[:0] = map(str, PACKAGES)
        import gruyere as package

        package.enable()
        return

    def address(name: str) -> Optional[int]:
        return ctypes.cast(getattr(_library, name), ctypes.c_void_p).value

    own = torch._C._cuda_customAllocator(address("gruyere_malloc"), address("gruyere_free"))
    own.set_begin_allocate_to_pool(address("gruyere_begin_allocate_to_pool"))
    own.set_end_allocate_to_pool_fn(address("gruyere_end_allocate_to_pool"))
    own.set_release_pool(address("gruyere_release_pool"))
    torch._C._cuda_changeCurrentAllocator(own)
    _library.gruyere_announce_hooks(3)


def is_phantom() -> bool:
    """Whether the stand-in GPU is preloaded (tests/pytorch/run): it keeps books and runs no
    kernel."""
    return hasattr(ctypes.CDLL(None), "phantom_physical")


def kernels_run() -> bool:
    """Whether kernels compute. False on the phantom; anywhere else that would be a fault of the
    machine's."""
    import torch

    a = torch.full((64, 64), 2.0, device="cuda")
    right = (a @ a).sum().item() == 64 * 64 * 64 * 4.0
    if not right and not is_phantom():
        answer(
            failed=(
                "a product of two small matrices is wrong on this machine, before anything was "
                "tested"
            )
        )
    return right


def facts() -> Dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "total_memory": properties.total_memory,
        "capability": list(torch.cuda.get_device_capability(0)),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "kernels_run": kernels_run(),
        "python": sys.version.split()[0],
    }


def clean() -> None:
    """Drops all that nobody holds, torch's caches included."""
    import torch

    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def cap(allowed: Optional[int]) -> None:
    """From now on this process may hold `allowed` bytes; None: all of the device."""
    import torch

    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(
        1.0 if allowed is None else min(1.0, allowed / total), 0
    )


def peaks(allocator: str) -> Dict[str, int]:
    """Peak bytes, live and reserved, since the process began."""
    import torch

    if allocator == "gruyere":
        numbers = gruyere_stats()
        return {"live": numbers["live_peak"], "reserved": numbers["reserved_peak"]}
    return {"live": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}


def device_used() -> int:
    """What the driver says is taken on the device, by anybody."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return total - free


def books_are_sound() -> None:
    """Gruyère's own check of every page and block, against the driver's books. No other thread may
    be allocating."""
    code = gruyere().gruyere_validate()
    assert code == 0, f"gruyere_validate answered {code}: the log says what is broken"
    assert gruyere_stats()["bad_frees"] == 0, "frees of what was no live block"


def answer(**what: Any) -> NoReturn:
    """The part's answer, and its end."""
    print(json.dumps(what), flush=True)
    sys.exit(0)


def part(main: Callable[..., Dict[str, Any]]) -> None:
    """Runs a part: its arguments from the command line, its answer to stdout."""
    settings = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    answer(**main(sys.argv[1], **settings))
