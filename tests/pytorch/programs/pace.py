"""Passes over a trace, in turn through torch's own allocator and through the library, in one
process.

    pace.py TRACE DRIVER PASSES

Every pass frees what it allocates. The first pass of each allocator begins with nothing held and is
reported by itself."""

import ctypes
import os
import sys

import torch

import gpu

path, driver_path, passes = sys.argv[1], sys.argv[2], int(sys.argv[3])
TORCH, GRUYERE, NOBODY = range(3)
FUNCTIONS = ("gruyere_malloc", "gruyere_free", "gruyere_record_stream", "gruyere_mark_step")


class Pass(ctypes.Structure):
    _fields_ = [("operations", ctypes.c_uint64), ("nanoseconds", ctypes.c_uint64)]


driver = ctypes.CDLL(driver_path)
driver.torch_driver_open.restype = ctypes.c_void_p
driver.torch_driver_streams.argtypes = [ctypes.c_void_p]
driver.torch_driver_pass.argtypes = [
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_uint32,
    ctypes.c_void_p,
    ctypes.c_void_p,
]

torch.cuda.init()
gruyere = ctypes.CDLL(os.environ["GRUYERE_TEST_LIBRARY"])
gruyere.gruyere_announce_hooks(3)
functions = (ctypes.c_void_p * len(FUNCTIONS))(
    *(gpu.address(getattr(gruyere, name)) for name in FUNCTIONS)
)
trace = driver.torch_driver_open(path.encode())
assert trace
streams = [torch.cuda.Stream() for _ in range(driver.torch_driver_streams(trace) - 1)]
handles = (ctypes.c_size_t * (len(streams) + 1))(0, *(stream.cuda_stream for stream in streams))


def once(who):
    """Nanoseconds a malloc or free, and how many there were."""
    measured = Pass()
    assert driver.torch_driver_pass(trace, handles, who, functions, ctypes.byref(measured)) == 0
    return measured.nanoseconds / measured.operations, measured.operations


first = {who: once(who)[0] for who in (TORCH, GRUYERE)}
times = {TORCH: [], GRUYERE: [], NOBODY: []}
counts = set()
for _ in range(passes):
    for who in times:
        time, operations = once(who)
        times[who].append(time)
        counts.add(operations)
held = gpu.phantom.phantom_physical(0)
torch_held = torch.cuda.memory_reserved()
torch.cuda.synchronize()
torch.cuda.empty_cache()
gruyere.gruyere_trim()
gpu.report(
    torch=times[TORCH],
    gruyere=times[GRUYERE],
    loop=times[NOBODY],
    torch_first=first[TORCH],
    gruyere_first=first[GRUYERE],
    operations=sorted(counts),
    held=held,
    torch_held=torch_held,
    left=gpu.phantom.phantom_physical(0),
    valid=gruyere.gruyere_validate(),
)
