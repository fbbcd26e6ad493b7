"""Replays a trace through torch's own allocator, as fast as it goes, and through the model of it."""

import ctypes
import sys

import torch

import gpu

path, driver_path = sys.argv[1:]


class Measured(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("operations", "nanoseconds", "peak_live")]


driver = ctypes.CDLL(driver_path)
driver.torch_driver_open.restype = ctypes.c_void_p
driver.torch_driver_streams.argtypes = [ctypes.c_void_p]
driver.torch_driver_replay.argtypes = [ctypes.c_void_p] * 3
driver.torch_driver_model_peak.argtypes = [ctypes.c_void_p, ctypes.c_bool, ctypes.c_uint64]
driver.torch_driver_model_peak.restype = ctypes.c_uint64

torch.cuda.init()
trace = driver.torch_driver_open(path.encode())
assert trace
streams = [torch.cuda.Stream() for _ in range(driver.torch_driver_streams(trace) - 1)]
handles = (ctypes.c_size_t * (len(streams) + 1))(0, *(stream.cuda_stream for stream in streams))
measured = Measured()
assert driver.torch_driver_replay(trace, handles, ctypes.byref(measured)) == 0
_, capacity = torch.cuda.mem_get_info()
gpu.report(
    real=gpu.phantom.phantom_physical_peak(0),
    torch_says=torch.cuda.max_memory_reserved(),
    model=driver.torch_driver_model_peak(trace, gpu.ALLOCATOR == "expandable", capacity),
    peak_live=measured.peak_live,
    operations=measured.operations,
    nanoseconds=measured.nanoseconds,
)
