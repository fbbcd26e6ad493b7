"""What torch's interface has since 2.12, through the native door: on the versions that have it."""

import importlib.metadata

import pytest

from door import settings, through
from probe import USE, probe  # noqa: F401

VERSION = tuple(map(int, importlib.metadata.version("torch").split(".")[:2]))


def since(*version):
    name = ".".join(map(str, version))
    return pytest.mark.skipif(VERSION < version, reason=f"torch has it from {name} on")


@since(2, 12)
def test_a_request_above_the_fraction_counts_as_rejected_where_torchs_setting_says_so(phantom):
    code = """
total = torch.cuda.get_device_properties(0).total_memory
torch.cuda.set_per_process_memory_fraction(100 * MIB / total)
for _ in range(2):
    assert "CUDA out of memory" in refused(tensor, 200, kind=torch.OutOfMemoryError)
wanted = 2 if os.environ["WANTED"] == "True" else 0
stats = torch.cuda.memory_stats()
assert (stats["num_oom_rejections"], stats["num_ooms"]) == (wanted, 2), stats
torch.cuda.reset_accumulated_memory_stats()
assert torch.cuda.memory_stats()["num_oom_rejections"] == 0
# Without a limit of the program's the device is what is short, and nobody has rejected anything.
torch.cuda.set_per_process_memory_fraction(1.0)
refused(tensor, 2 * total // MIB, kind=torch.OutOfMemoryError)
assert torch.cuda.memory_stats()["num_oom_rejections"] == 0
"""
    for wanted in (True, False):
        setting = f"throw_on_cudamalloc_oom:{wanted}"
        through(phantom, code=code, WANTED=wanted, PYTORCH_ALLOC_CONF=setting)


@since(2, 12)
def test_observers_of_rejected_requests_hear_what_torch_tells_them(phantom, probe):  # noqa: F811
    through(phantom, PROBE=probe, PYTORCH_ALLOC_CONF="throw_on_cudamalloc_oom:True", code=USE + """
probe.probe_rejected.restype = ctypes.c_uint64
total = torch.cuda.get_device_properties(0).total_memory
torch.cuda.set_per_process_memory_fraction(100 * MIB / total)
probe.probe_observe_rejections()
block = tensor(30)
def heard():
    return [probe.probe_rejected(what) for what in range(5)]
assert heard() == [0] * 5
held = torch.cuda.memory_reserved()
assert "CUDA out of memory" in refused(tensor, 200, kind=torch.OutOfMemoryError)
count, device, size, allocated, memory = heard()
assert (count, device, size, memory) == (1, 0, 200 * MIB, total), heard()
# What lay idle went back before it was refused.
assert 30 * MIB <= allocated <= held, (allocated, held)
tensor(40)
assert heard()[0] == 1
""")


@since(2, 12)
def test_a_pointer_tells_where_its_block_came_from(phantom, probe):  # noqa: F811
    through(phantom, PROBE=probe, code=USE + """
def known(pointer):
    return probe.probe_has_context(ctypes.c_void_p(pointer)) == 1
before = tensor(1)
assert not known(before.data_ptr())
torch.cuda.memory._record_memory_history(stacks="python")
block = tensor(3)
start = block.data_ptr()
assert known(start) and known(start + 3 * MIB - 1) and not known(before.data_ptr())
assert not known(0) and not known(1)
del block
assert not known(start)
block = tensor(3)
torch.cuda.memory._record_memory_history(None)
assert not known(block.data_ptr())
""")


@since(2, 13)
def test_statistics_say_what_each_private_pool_holds(phantom):
    through(phantom, code="""
assert not any("private_pools" in key for key in torch.cuda.memory_stats())
pool = torch.cuda.MemPool()
with torch.cuda.use_mem_pool(pool):
    small, large = torch.empty(1000, dtype=torch.uint8, device="cuda"), tensor(4)
outside = tensor(30)
name = "reserved_bytes_by_private_pools." + "_".join(map(str, pool.id))
def held():
    stats = torch.cuda.memory_stats()
    return [stats.get(f"{name}.{of}.current") for of in ("all", "small_pool", "large_pool")]
assert held() == [22 * MIB, 2 * MIB, 20 * MIB], held()
del small, large, pool
gc.collect()
torch.cuda.empty_cache()
assert held() == [None] * 3
""")


@since(2, 13)
def test_a_tensor_of_a_graph_comes_back_at_its_address_or_not_at_all(phantom):
    """As torch's own allocator: of the pool and the stream that the request goes to."""
    through(phantom, code="""
import contextlib
@contextlib.contextmanager
def inside(pool):
    torch._C._cuda_beginAllocateCurrentThreadToPool(0, pool)
    yield
    torch._C._cuda_endAllocateToPool(0, pool)
    torch._C._cuda_releasePool(0, pool)
def again(size, address):
    storage = torch.empty(0, dtype=torch.uint8, device="cuda").untyped_storage()
    storage._resize_with_addr_(size, address)
    assert (storage.data_ptr(), storage.nbytes()) == (address, size)
    return storage
ELSEWHERE = "the current stream and memory pool have no free memory there"
side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
sizes = (30 * MIB, 1000, 5 * MIB)
with torch.cuda.graph(graph, stream=side):
    blocks = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
places = [(size, block.data_ptr()) for size, block in zip(sizes, blocks)]
live = torch.cuda.memory_allocated()
with inside(graph.pool()), torch.cuda.stream(side):
    assert "at exactly" in refused(again, *places[0])
del blocks
held = torch.cuda.memory_reserved()
with inside(graph.pool()):
    assert ELSEWHERE in refused(again, *places[0])
with torch.cuda.stream(side):
    assert ELSEWHERE in refused(again, *places[0])
    assert "at exactly" in refused(again, MIB, 1 << 45)
with inside(graph.pool()), torch.cuda.stream(side):
    kept = [again(*place) for place in places]
    assert torch.cuda.memory_allocated() == live and torch.cuda.memory_reserved() == held
    assert "at exactly" in refused(again, *places[2])
    del kept
    assert torch.cuda.memory_allocated() == live - sum(-(-size // 512) * 512 for size in sizes)
pool = torch.cuda.MemPool()
with torch.cuda.use_mem_pool(pool):
    places = [(block.numel(), block.data_ptr()) for block in (tensor(4), tensor(2))]
    kept = [again(*place) for place in places]
del kept
ordinary = tensor(50)
place = ordinary.data_ptr() + 10 * MIB
assert "at exactly" in refused(again, 20 * MIB, place)
del ordinary
again(20 * MIB, place)
""")


@since(2, 13)
def test_that_a_capture_begins_and_ends_need_not_be_told(phantom):
    """torch notes it (markCaptureBegin, markCaptureEnd) for itself: the driver is asked here."""
    through(phantom, code="""
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    inner = tensor(3)
pool = "_".join(map(str, graph.pool()))
name = f"reserved_bytes_by_private_pools.{pool}.all.current"
captured = torch.cuda.memory_stats()[name]
assert captured >= 3 * MIB
del inner
# Outside of it, what it freed is not used; in another capture of its pool it is.
outside = tensor(3)
assert torch.cuda.memory_stats()[name] == captured
second = torch.cuda.CUDAGraph()
with torch.cuda.graph(second, pool=graph.pool()):
    inner = tensor(3)
assert torch.cuda.memory_stats()[name] == captured
""")


@since(2, 14)
def test_what_is_said_of_a_live_block_is_in_the_trace_in_its_place(phantom):
    through(phantom, code="""
assert torch.cuda.memory._memory_metadata_supported()
torch.cuda.memory._record_memory_history(max_entries=100)
torch.cuda.memory._set_memory_metadata("of the request")
block = tensor(3)
torch.cuda.memory._set_memory_metadata("")
torch._C._cuda_annotateMemory(block.data_ptr(), "of the block")
later = tensor(1)
assert "no live allocation found" in refused(
    torch._C._cuda_annotateMemory, block.data_ptr() + 512, "of none"
)
found = [
    (entry["action"], entry["addr"], entry["size"], entry["user_metadata"])
    for entry in torch.cuda.memory._snapshot()["device_traces"][0]
    if not entry["action"].startswith("segment")
]
assert found == [
    ("alloc", block.data_ptr(), 3 * MIB, "of the request"),
    ("annotate", block.data_ptr(), 3 * MIB, "of the block"),
    ("alloc", later.data_ptr(), MIB, ""),
], found
# As many as of the history's entries, and none after it was cleared or of an action left out.
for _ in range(300):
    torch._C._cuda_annotateMemory(block.data_ptr(), "again")
count = sum(e["action"] == "annotate" for e in torch.cuda.memory._snapshot()["device_traces"][0])
assert count == 100, count
torch.cuda.memory._record_memory_history(max_entries=100, clear_history=True)
assert torch.cuda.memory._snapshot()["device_traces"][0] == []
torch.cuda.memory._record_memory_history(None)
torch._C._cuda_annotateMemory(block.data_ptr(), "to nobody")
""")


@since(2, 14)
def test_pinned_memory_is_in_the_snapshot_as_torch_puts_it_there(phantom):
    through(phantom, code="""
torch.cuda.memory._record_memory_history(max_entries=100, record_pinned_host_memory=True)
pinned = torch.empty(MIB, dtype=torch.uint8, pin_memory=True)
taken = torch.cuda.memory._snapshot()
(segment,) = taken["host_segments"]
assert segment["address"] == pinned.data_ptr() and segment["total_size"] == MIB
assert [entry["action"] for entry in taken["host_traces"]] == ["segment_alloc", "alloc"]
torch.cuda.memory._record_memory_history(None)
""")


@pytest.mark.parametrize("version, words", [("2.16.0", "is newer than 2.15"), ("2.10.0", "older")])
def test_a_torch_that_is_not_known_gets_the_pluggable_door_and_one_line(phantom, version, words):
    ran = phantom.run("", allocator="door", **settings(), code=f"""
import torch, gruyere
torch.__version__ = {version!r}
gruyere.enable()
from gruyere import _doctor, _enable
block = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
assert torch.cuda.memory_allocated() == 3 << 20
print(_doctor._door(*_enable.door()))
""")
    assert ran.code == 0, ran.out + ran.err
    said = f"pluggable (the native door is not available: torch {version} "
    assert ran.out.startswith(said) and words in ran.out, ran.out
    assert "; this is gruyere " in ran.out, ran.out
    (line,) = [line for line in ran.err.splitlines() if "GruyereWarning" in line]
    assert words in line and "The pluggable door is used instead" in line


def test_a_table_in_another_order_is_noticed_before_it_is_used(phantom):
    """The torch that is loaded has another function where its headers have one, as where it was
    replaced on disk: the pluggable door serves, and the line names both."""
    ran = phantom.run("", allocator="door", **settings(), code="""
import ctypes, mmap, os, torch, gruyere
library = ctypes.CDLL("libtorch_cuda.so", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
prefix = "_ZN5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocator"
table = ctypes.addressof(ctypes.c_void_p.in_dll(library, "_ZTV" + prefix[2:] + "E"))
words = (ctypes.c_void_p * 40).from_address(table)
first = table // mmap.PAGESIZE * mmap.PAGESIZE
pages = ctypes.c_void_p(first), ctypes.c_size_t(2 * mmap.PAGESIZE)
assert ctypes.CDLL(None).mprotect(*pages, mmap.PROT_READ | mmap.PROT_WRITE) == 0
places = []
for method in ("9raw_allocEm", "10raw_deleteEPv"):
    function = ctypes.cast(getattr(library, prefix + method), ctypes.c_void_p).value
    places.append(next(at for at in range(2, 40) if words[at] == function))
one, other = places
words[one], words[other] = words[other], words[one]
gruyere.enable()
from gruyere import _enable
print(*_enable.door())
assert torch.cuda.get_allocator_backend() == "pluggable"
""")
    assert ran.code == 0, ran.out + ran.err
    assert ran.out.startswith("pluggable the native door is not available: function "), ran.out
    assert "is raw_delete(void*) where it is loaded and raw_alloc(unsigned long) in its" in ran.out
    (line,) = [line for line in ran.err.splitlines() if "GruyereWarning" in line]
    assert "The pluggable door is used instead" in line
