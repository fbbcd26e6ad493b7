"""What every program needs: the allocator that the test asked for, and its books next to torch's
and the phantom's."""

import atexit
import ctypes
import gc
import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import torch

ALLOCATOR = os.environ["GRUYERE_TEST_ALLOCATOR"]
LIBRARY = os.environ["GRUYERE_TEST_LIBRARY"]
ROUND = 512

# torch 2.15 may abort where a program ends close behind a backward (docs/pytorch.md).
_TORCH = Path(__file__).resolve().parents[3] / "python_loader" / "gruyere" / "_torch"
sys.path.append(str(_TORCH))
import backward_end  # noqa: E402

sys.path.pop()
atexit.register(backward_end.wait)

# The phantom computes nothing, and it has no cuDNN.
torch.backends.cudnn.enabled = False
torch.backends.cuda.enable_cudnn_sdp(False)
if torch.__version__.startswith("2.4."):
    # Its other attention kernels are found by a query that the phantom does not answer.
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_flash_sdp(False)

phantom = ctypes.CDLL(os.environ["GRUYERE_TEST_PHANTOM"])
for name in "physical physical_peak plain pools handles misuses calls".split():
    getattr(phantom, f"phantom_{name}").restype = ctypes.c_uint64
for name in "live peak mallocs frees violations".split():
    getattr(phantom, f"phantom_witness_{name}").restype = ctypes.c_uint64
phantom.phantom_set_capacity.argtypes = [ctypes.c_uint32, ctypes.c_uint64]
phantom.phantom_fail.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_int]


class Stats(ctypes.Structure):
    """GruyereStats, version 1."""

    _fields_ = [("size", ctypes.c_uint32), ("version", ctypes.c_uint32)] + [
        (name, ctypes.c_uint64)
        for name in """total_memory limit reserved reserved_peak live live_peak pending arena_free
            largest_free slab_bytes slab_free captured retries out_of_memories bad_frees
            events_recorded events_queried""".split()
    ]


library = ctypes.CDLL(LIBRARY) if ALLOCATOR in ("bare", "hooked", "door") else None
witnessed = ALLOCATOR == "hooked"
# By torch's own interface: what torch's functions say is then what the library says, and need not
# be counted beside.
by_door = ALLOCATOR == "door"


def address(function):
    return ctypes.cast(function, ctypes.c_void_p).value


def install():
    """Puts the test's allocator in place; before CUDA is initialised."""
    if by_door:
        import gruyere
        from gruyere import _enable

        gruyere.enable(door="native")
        assert _enable.door() == ("native", "door:native"), _enable.door()
        return
    if library is not None:
        announce_streams()
    if ALLOCATOR == "bare":
        allocator = torch.cuda.memory.CUDAPluggableAllocator(
            LIBRARY, "gruyere_malloc", "gruyere_free"
        )
        torch.cuda.memory.change_current_allocator(allocator)
    elif ALLOCATOR == "hooked":
        phantom.phantom_witness_set(
            ctypes.c_size_t(address(library.gruyere_malloc)),
            ctypes.c_size_t(address(library.gruyere_free)),
        )
        allocator = torch._C._cuda_customAllocator(
            address(phantom.phantom_witness_malloc), address(phantom.phantom_witness_free)
        )
        allocator.set_init_fn(address(library.gruyere_init))
        allocator.set_reset_fn(address(library.gruyere_reset))
        allocator.set_memory_fraction_fn(address(library.gruyere_memory_fraction))
        allocator.set_base_alloc_fn(address(library.gruyere_base_alloc))
        allocator.set_record_stream_fn(address(library.gruyere_record_stream))
        allocator.set_begin_allocate_to_pool(address(library.gruyere_begin_allocate_to_pool))
        allocator.set_end_allocate_to_pool_fn(address(library.gruyere_end_allocate_to_pool))
        allocator.set_release_pool(address(library.gruyere_release_pool))
        torch._C._cuda_changeCurrentAllocator(allocator)
        library.gruyere_announce_hooks(3)


def announce_streams():
    """torch never destroys the streams of its pools, and the library is told so as the package does
    it (`gruyere_stream_lasts`): without, it may not ask such a stream whether a capture of its is
    over."""
    for name in ("announcing", "announcing._native", "announcing._torch"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["announcing._native"].library = types.SimpleNamespace(load=lambda: library)
    package = Path(__file__).resolve().parents[3] / "python_loader" / "gruyere"
    spec = importlib.util.spec_from_file_location(
        "announcing._torch.streams", package / "_torch" / "streams.py"
    )
    streams = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(streams)
    streams.install()


def rounded(size):
    return -(-size // ROUND) * ROUND


def storages(device=0):
    """Live CUDA storages that Python can see: address to bytes."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.is_cuda and thing.device.index == device:
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    found.pop(0, None)
    return found


def stats(device=0):
    numbers = Stats(size=ctypes.sizeof(Stats))
    assert library.gruyere_stats(device, ctypes.byref(numbers)) == 0
    return numbers


def from_outside(what="stat"):
    """What `gruyere stat` (or `map`) says of this process."""
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in ("LD_PRELOAD", "LD_LIBRARY_PATH")
    }
    command = [os.environ["GRUYERE_TEST_COMMAND"], what, str(os.getpid()), "--json"]
    return json.loads(
        subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    )


def placed():
    """Live bytes by the lifetime whose memory they lie in, whatever they are counted as."""
    found = {}
    for part in from_outside("map")["ranges"]:
        found[part["lifetime"]] = found.get(part["lifetime"], 0) + part["live_bytes"]
    return {lifetime: bytes_ for lifetime, bytes_ in found.items() if bytes_}


def check_books(device=0, seen=None):
    """What torch thinks live equals what the library says; held memory covers it; the phantom holds
    what the library says.

    What torch thinks live is the witness's count, or, under the bare constructor, `seen` (the bytes
    of the storages that the program knows of: only where torch keeps none of its own)."""
    torch.cuda.synchronize(device)
    if library is None:
        assert phantom.phantom_physical(device) == torch.cuda.memory_reserved(device)
        assert torch.cuda.memory_allocated(device) <= torch.cuda.memory_reserved(device)
        return
    numbers = stats(device)
    if witnessed:
        assert numbers.live == phantom.phantom_witness_live(device), (
            numbers.live,
            phantom.phantom_witness_live(device),
        )
        assert phantom.phantom_witness_violations() == 0
    elif by_door:
        assert numbers.live == torch.cuda.memory_allocated(device), (
            numbers.live,
            torch.cuda.memory_allocated(device),
        )
        assert numbers.reserved == torch.cuda.memory_reserved(device), (
            numbers.reserved,
            torch.cuda.memory_reserved(device),
        )
    elif seen is not None:
        assert numbers.live == seen, (numbers.live, seen)
    assert numbers.live <= numbers.live_peak
    assert numbers.live + numbers.pending <= numbers.reserved <= numbers.reserved_peak
    physical = phantom.phantom_physical(device)
    if "passthrough" in os.environ.get("GRUYERE_CONF", ""):
        # The driver rounds each small request up; nobody can know by how much.
        assert numbers.reserved <= physical, (numbers.reserved, physical)
    else:
        assert numbers.reserved == physical, (numbers.reserved, physical)
    assert numbers.bad_frees == 0
    assert library.gruyere_validate() == 0


def check_nothing_is_left(device=0, captured=False):
    """Once the program has dropped everything, torch's own caches included, nothing is live and all
    memory can go back; but for what was `captured` without the hooks: nobody tells when a graph is
    gone, so that memory is never used again."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    if library is None:
        assert torch.cuda.memory_allocated(device) == 0
    else:
        # Under the bare constructor empty_cache reaches nobody.
        if not witnessed and not by_door:
            library.gruyere_trim()
        assert stats(device).live == 0
        assert stats(device).pending == 0
        if witnessed:
            assert phantom.phantom_witness_mallocs() == phantom.phantom_witness_frees()
    if captured and library is not None and not witnessed and not by_door:
        assert stats(device).captured == phantom.phantom_physical(device) > 0
    else:
        assert phantom.phantom_physical(device) == 0


def report(**facts):
    print(json.dumps(facts), flush=True)
