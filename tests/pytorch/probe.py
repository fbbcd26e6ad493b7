"""What torch's C++ code asks of its allocator and Python cannot: native_probe.cpp, built once a
run, for whoever imports the fixture."""

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest
from filelock import FileLock

from conftest import HERE, TARGET
from door import TOOLKIT

PROBE = TARGET / "native_probe.so"
USE = """
import ctypes
torch.cuda.init()
probe = ctypes.CDLL(os.environ["PROBE"])
probe.probe_said.restype = ctypes.c_char_p
probe.probe_largest.restype = probe.probe_callbacks.restype = ctypes.c_size_t
probe.probe_largest.argtypes = [ctypes.c_size_t]
probe.probe_vain_callback.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
probe.probe_callbacks.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.POINTER(ctypes.c_int)]
def said():
    return probe.probe_said().decode()
"""
# With pools over another allocator.
OVER = USE + """
probe.probe_other_count.restype = probe.probe_other_bytes.restype = ctypes.c_size_t
probe.probe_other_bytes.argtypes = [ctypes.c_void_p]
probe.probe_other_set.argtypes = [ctypes.c_int, ctypes.c_size_t]
probe.probe_told.restype = ctypes.c_size_t
probe.probe_told.argtypes = [ctypes.c_size_t, ctypes.POINTER(ctypes.c_uint64)]
probe.probe_registered.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
other = torch.cuda.memory.CUDAPluggableAllocator(
    os.environ["PROBE"], "probe_other_give", "probe_other_take"
).allocator()
def counts():
    "Segments that the other allocator gave, took back, and was given that were none of its."
    return tuple(probe.probe_other_count(what) for what in range(3))
def segments(pool):
    "Bytes and live bytes of a pool's segments, by address."
    found = pool.snapshot()
    found = found["segments"] if isinstance(found, dict) else found
    return {one["address"]: (one["total_size"], one["allocated_size"]) for one in found}
def of(size):
    return torch.empty(size, dtype=torch.uint8, device="cuda")
def events():
    fields, found = (ctypes.c_uint64 * 5)(), []
    for at in range(probe.probe_told(1 << 40, fields)):
        probe.probe_told(at, fields)
        found.append(tuple(fields))
    return found
"""


@pytest.fixture(scope="module")
def probe():
    # Found and not imported: nothing of NVIDIA's is in this process.
    (root,) = importlib.util.find_spec("torch").submodule_search_locations
    source = HERE / "native_probe.cpp"
    wanted = Path(root, "version.py").read_text() + source.read_text()
    stamp = PROBE.with_suffix(".stamp")
    with FileLock(PROBE.with_suffix(".lock")):
        if not PROBE.exists() or not stamp.exists() or stamp.read_text() != wanted:
            folders = [f"{root}/include", TOOLKIT / "include"]
            command = [
                os.environ.get("CXX", "c++"),
                "-std=c++20",
                "-O1",
                "-fPIC",
                "-shared",
                "-w",
                "-D_GLIBCXX_USE_CXX11_ABI=1",
            ]
            command += [word for folder in folders for word in ("-isystem", folder)]
            subprocess.run(
                [*command, source, "-o", PROBE, f"-L{root}/lib", "-lc10_cuda", "-lc10"], check=True
            )
            stamp.write_text(wanted)
    return PROBE
