"""The native door from torch's C++ side: what Python cannot ask of an allocator."""

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest
from filelock import FileLock

from conftest import HERE, TARGET
from door import TOOLKIT, through

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
                "-std=c++17",
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


def test_a_pointer_its_context_its_deleter_and_both_registrations_are_as_torch_expects(
    phantom, probe
):
    through(
        phantom, PROBE=probe, PHANTOM_DEVICES=2, PHANTOM_MEMORY="1GiB", GRUYERE_CONF="headroom:0",
        code=USE + """
wrong = probe.probe_data_pointer()
assert wrong == 0, (wrong, said())
assert probe.probe_copies(1) == 0
assert torch.cuda.memory_allocated() == 0
# cuDNN asks how much a workspace may have: all that could be had, and what it names itself if that
# is more.
whole = probe.probe_largest(0)
assert 900 * MIB < whole <= 1024 * MIB
block = tensor(600)
assert 300 * MIB < probe.probe_largest(0) <= whole - 600 * MIB
assert probe.probe_largest(5 << 40) == 5 << 40
del block
# What torch's functions throw comes out as they threw it.
assert probe.probe_throwing_filter() == 3 and said() == "a filter's own error"
assert tensor(1).numel() == MIB
# Others may give memory before there is an out-of-memory, and are asked once.
code = ctypes.c_int()
assert probe.probe_callbacks(700 * MIB, 600 * MIB, ctypes.byref(code)) == 1 and code.value == 0
assert probe.probe_callbacks(MIB, 2000 * MIB, ctypes.byref(code)) == 1
assert code.value == 1 and said().startswith("CUDA out of memory. Tried to allocate 1.95 GiB.")
assert torch.cuda.memory_stats()["num_ooms"] >= 1
assert probe.probe_vain_callback(3000 * MIB, 2000 * MIB) == 1
assert said().startswith("CUDA out of memory. Tried to allocate 1.95 GiB."), said()
# The free in the middle of the second request is one of its own, and the request goes on as itself.
torch.cuda.memory._record_memory_history(stacks="python")
assert probe.probe_callbacks(700 * MIB, 600 * MIB, ctypes.byref(code)) == 1 and code.value == 0
entries = [
    entry
    for entry in torch.cuda.memory._snapshot()["device_traces"][0]
    if entry["action"] in ("alloc", "free_requested")
]
assert [entry["action"] for entry in entries] == [
    "alloc",
    "free_requested",
    "alloc",
    "free_requested",
]
assert all(entry["frames"] for entry in entries), entries
torch.cuda.memory._record_memory_history(None)
for refuse, remedy in (
    (probe.probe_checkpoint, "make_graphed_callables"),
    (probe.probe_restore, "make_graphed_callables"),
    (probe.probe_tracker, "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"),
    (probe.probe_ipc, "tensor.cpu()"),
):
    assert refuse() == 2 and remedy in said(), said()
gpu.check_books()
gpu.check_nothing_is_left()
""")
