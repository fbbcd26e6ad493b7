"""Replays a trace through torch's own allocator and through the model of it.

    replay.py TRACE DRIVER peak                 as fast as it goes, with room to spare
    replay.py TRACE DRIVER clock KERNEL COSTS   with the program's kernels, events and waits, under
                                                the virtual clock
"""

import ctypes
import sys

import torch

import gpu

path, driver_path, what, *settings = sys.argv[1:]
expandable = gpu.ALLOCATOR == "expandable"


class Numbers(ctypes.Structure):
    def facts(self):
        return {name: getattr(self, name) for name, _ in self._fields_}


class Measured(Numbers):
    _fields_ = [(name, ctypes.c_uint64) for name in ("operations", "nanoseconds", "peak_live")]


class Outcome(Numbers):
    _fields_ = [(name, ctypes.c_uint64) for name in ("reached", "held_peak", "host", "device_end")]


driver = ctypes.CDLL(driver_path)
driver.torch_driver_open.restype = ctypes.c_void_p
driver.torch_driver_streams.argtypes = [ctypes.c_void_p]
driver.torch_driver_replay.argtypes = [ctypes.c_void_p] * 3
driver.torch_driver_run_real.argtypes = [ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p]
driver.torch_driver_run_model.argtypes = [
    ctypes.c_void_p, ctypes.c_bool, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32,
    ctypes.c_void_p,
]  # fmt: skip

torch.cuda.init()
trace = driver.torch_driver_open(path.encode())
assert trace
_, capacity = torch.cuda.mem_get_info()


def model(kernel, costs):
    outcome = Outcome()
    assert (
        driver.torch_driver_run_model(
            trace, expandable, capacity, kernel, costs, ctypes.byref(outcome)
        )
        == 0
    )
    return outcome.facts()


if what == "peak":
    streams = [torch.cuda.Stream() for _ in range(driver.torch_driver_streams(trace) - 1)]
    handles = (ctypes.c_size_t * (len(streams) + 1))(0, *(stream.cuda_stream for stream in streams))
    measured = Measured()
    assert driver.torch_driver_replay(trace, handles, ctypes.byref(measured)) == 0
    gpu.report(
        real=gpu.phantom.phantom_physical_peak(0),
        torch_says=torch.cuda.max_memory_reserved(),
        model=model(0, 0)["held_peak"],
        **measured.facts(),
    )
else:
    kernel, costs = map(int, settings)
    outcome = Outcome()
    assert driver.torch_driver_run_real(trace, costs > 0, ctypes.byref(outcome)) == 0
    gpu.report(real=outcome.facts(), model=model(kernel, costs))
