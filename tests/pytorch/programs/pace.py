"""Passes over a trace, in turn through torch's own allocator and through the library, in one
process.

    pace.py TRACE DRIVER PASSES THREADS

Every pass frees what it allocates. The first pass of each allocator begins with nothing held and is
reported by itself. With several threads, each makes a pass on streams of its own at the same time;
wall time is counted then, else the thread's."""

import ctypes
import os
import sys
import threading
import time

import torch

import gpu

path, driver_path, passes, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
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
number = driver.torch_driver_streams(trace)
streams = [[torch.cuda.Stream() for _ in range(number)] for _ in range(count)]
handles = [
    (ctypes.c_size_t * number)(*(stream.cuda_stream for stream in own)) for own in streams
]
if count == 1:
    # Its first one is the default stream, as the traced program's was.
    handles[0][0] = 0


def one(who, own):
    measured = Pass()
    assert driver.torch_driver_pass(trace, own, who, functions, ctypes.byref(measured)) == 0
    return measured


def once(who):
    """Nanoseconds a malloc or free of all threads together, and how many one thread made."""
    if count == 1:
        measured = one(who, handles[0])
        return measured.nanoseconds / measured.operations, measured.operations
    done = []
    threads = [
        threading.Thread(target=lambda own=own: done.append(one(who, own))) for own in handles
    ]
    start = time.perf_counter_ns()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spent = time.perf_counter_ns() - start
    assert len(done) == count
    return spent / sum(measured.operations for measured in done), done[0].operations


first = {who: once(who)[0] for who in (TORCH, GRUYERE)}
times = {TORCH: [], GRUYERE: [], NOBODY: []}
counts = set()
for _ in range(passes):
    for who in times:
        spent, operations = once(who)
        times[who].append(spent)
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
