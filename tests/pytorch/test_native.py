"""torch's own allocators on the phantom: what torch says it reserves is what the phantom says is
held."""

import subprocess
import sys

import pytest

from conftest import TARGET, clean_environment


@pytest.fixture(params=["native", "expandable"])
def native(request):
    return request.param


def test_a_tensor_on_the_phantom(phantom):
    ran = phantom.run("", code="import torch; print(torch.ones(4, device='cuda').shape[0])").check()
    assert ran.out.strip() == "4"
    assert ran.books["devices"][0]["plain"] == 2 << 20


def test_streams_hold_what_torch_reserves(phantom, native):
    phantom.run("several_streams", allocator=native).check()


def test_a_transformer_holds_what_torch_reserves(phantom, native):
    ran = phantom.run("transformer", allocator=native).check()
    assert ran.report["grads_dropped"]


def test_expandable_segments_use_virtual_memory_and_give_it_all_back(phantom):
    ran = phantom.run("transformer", allocator="expandable").check()
    assert ran.books["calls"]["cuMemMap"] > 0
    assert ran.books["calls"]["cuMemCreate"] == ran.books["calls"]["cuMemRelease"]
    assert ran.books["vmm_handles"] == 0
    assert ran.books["devices"][0]["handles"] == 0


def test_out_of_memory_is_torchs_own(phantom, native):
    ran = phantom.run("out_of_memory", allocator=native, PHANTOM_MEMORY="1GiB").check()
    assert ran.report["type"] == "OutOfMemoryError"
    # Expandable segments map 20 MiB at a time: 51 of them are 1020 MiB.
    assert ran.report["blocks"] == {"native": 16, "expandable": 15}[native]


def test_graphs_capture_and_replay(phantom, native):
    ran = phantom.run("graphs", allocator=native).check()
    assert ran.books["program"]["cuGraphLaunch"] == 12


def test_small_copies_arrive_and_large_ones_are_skipped(phantom):
    code = """
import torch
small = torch.arange(100, dtype=torch.uint8)
assert torch.equal(small.cuda().cpu(), small)
large = torch.ones(1 << 20, dtype=torch.uint8)
assert large.cuda().cpu().sum() == 0
"""
    phantom.run("", code=code).check()


@pytest.mark.parametrize("library", ["libtorch_cuda_linalg.so", "libcaffe2_nvrtc.so"])
def test_libraries_that_torch_opens_later_find_every_function(phantom, library):
    """What `import torch` loads was bound by the import itself; these come when they are needed."""
    code = f"""
import ctypes, os, torch
ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "{library}"), mode=os.RTLD_NOW)
"""
    ran = phantom.run("", code=code)
    assert ran.code == 0, ran.err


def test_a_wrong_setting_of_the_phantom_is_named(phantom):
    ran = phantom.run("", code="import torch; torch.cuda.init()", PHANTOM_MEMORY="80 GB")
    assert ran.code != 0
    assert "PHANTOM_MEMORY=80 GB" in ran.err


def test_a_fork_has_no_cuda(phantom):
    code = """
import os, ctypes, torch
driver = ctypes.CDLL(os.environ["GRUYERE_TEST_PHANTOM"])
torch.cuda.init()
child = os.fork()
if child == 0:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    os._exit(driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    ran = phantom.run("", code=code).check()
    assert ran.out.strip() == "3"
    assert ran.books["forked_calls"] == 1


def test_without_the_phantom_torch_finds_no_libraries():
    """The environment is the phantom's alone: nothing of NVIDIA's is installed beside it."""
    ran = subprocess.run(
        [sys.executable, "-c", "import torch"],
        env=clean_environment(),
        capture_output=True,
        text=True,
        cwd=TARGET,
    )
    assert ran.returncode != 0
    assert "libcudart" in ran.stderr
