"""Streams of torch's pools, which last, beside streams of somebody else's, which are destroyed
without a word: `gruyere.enable()`, as users do it.

Prints which handles the library was told of."""

import ctypes
import json
import os
import sys

import torch

import gruyere
from gruyere._native.library import load

gruyere.enable()
told = []
library = load()
real = library.gruyere_stream_lasts
real.argtypes, real.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_int


def lasts(device, stream):
    told.append((device, stream))
    return real(device, stream)


library.gruyere_stream_lasts = lasts
runtime = ctypes.CDLL(os.environ["GRUYERE_TEST_PHANTOM"])


def external():
    """A stream that another library makes, and destroys when it likes."""
    handle = ctypes.c_void_p()
    assert runtime.cudaStreamCreateWithFlags(ctypes.byref(handle), 1) == 0
    return handle.value


kept = []
for turn in range(40):
    handle = external()
    stream = torch.cuda.ExternalStream(handle)
    with torch.cuda.stream(stream):
        tensor = torch.empty(5 << 20, dtype=torch.uint8, device="cuda")
        tensor.zero_()
        torch.cuda.current_stream()
    assert told == [], "an external stream was announced"
    kept.append(tensor)
    stream.synchronize()
    assert runtime.cudaStreamDestroy(ctypes.c_void_p(handle)) == 0
    # Freed when the stream is gone, and wanted on others.
    if turn % 3 == 0:
        kept.clear()
    torch.empty((40 + turn) << 20, dtype=torch.uint8, device="cuda")
first = torch.cuda.Stream()
rounds = [torch.cuda.Stream().cuda_stream for _ in range(31)] + [torch.cuda.Stream().cuda_stream]
# The last pool that was told of is that of priority 0, from the stream after the first on.
assert told[-32][1] == rounds[0], "the pool does not go on where it was"
assert rounds[-1] == first.cuda_stream, "after 32 streams the first one comes again"
high = torch.cuda.Stream(priority=-1)
handles = {stream for _, stream in told}
assert {first.cuda_stream, high.cuda_stream, *rounds} <= handles
count = len(told)
with torch.cuda.stream(high):
    tensor = torch.empty(5 << 20, dtype=torch.uint8, device="cuda")
    tensor.record_stream(first)
del tensor
handle = external()
torch.cuda.ExternalStream(handle)
torch.cuda.Stream(
    stream_id=first.stream_id, device_index=first.device_index, device_type=first.device_type
)
assert len(told) == count == len(handles) and handle not in handles
kept.clear()
torch.cuda.empty_cache()
print(
    json.dumps(
        {
            "told": len(handles),
            "of_a_priority": len(set(rounds)),
            "first": first.cuda_stream == min(handles),
        }
    )
)
sys.stdout.flush()
