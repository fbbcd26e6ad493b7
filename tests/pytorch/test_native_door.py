"""The native door: torch's own allocator interface, in front of Gruyère. Each program keeps the
books as those of the pluggable door do (programs/gpu.py), but for what torch says live, which here
is the library's own number."""

import pytest

from conftest import HERE, Phantom
from door import settings, through

COUNTS = ("allocation", "active")
BYTES = ("allocated_bytes", "active_bytes", "requested_bytes")
POOLS = ("all", "small_pool", "large_pool")
FIELDS = ("current", "peak", "allocated", "freed")


def test_it_is_torchs_allocator_everywhere_and_nothing_is_in_use_before_torch_says_so(phantom):
    ran = through(phantom, code="""
assert torch.cuda.get_allocator_backend() == "gruyere"
assert not torch.cuda.is_initialized() and not torch._C._accelerator_isAllocatorInitialized()
# No context: a child may still be forked, and use CUDA.
child = os.fork()
if child == 0:
    os._exit(0 if tensor(1).numel() == MIB else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
torch.cuda.init()
torch.cuda.init()
assert torch._C._accelerator_isAllocatorInitialized()
block = tensor(4)
assert torch.accelerator.memory_allocated() == torch.cuda.memory_allocated() == 4 * MIB
# What torch remembers of the change, and that there can be no other.
assert "already initialized" in refused(
    torch.cuda.memory.change_current_allocator, torch.cuda.memory._get_current_allocator()
)
assert gruyere.is_enabled() and "called before" in refused(lambda: gruyere.enable(share=False))
gruyere.enable()  # for nothing else: a notebook's cell that runs again
gpu.check_books()
del block
torch.accelerator.empty_cache()
assert torch.cuda.memory_reserved() == gpu.phantom.phantom_physical(0) == 0
gpu.check_nothing_is_left()
""")
    assert ran.err == ""


def test_too_late_is_said_and_a_later_change_is_noticed(phantom):
    code = """
import os, torch, gruyere
if os.environ["WHEN"] == "late":
    torch.cuda.init()
    try:
        gruyere.enable(door="native")
    except gruyere.GruyereError as error:
        assert "too late" in str(error)
        print(torch.cuda.get_allocator_backend())
else:
    gruyere.enable(door="native")
    library = os.environ["GRUYERE_LIBRARY"]
    other = torch.cuda.memory.CUDAPluggableAllocator(library, "gruyere_malloc", "gruyere_free")
    torch.cuda.memory.change_current_allocator(other)
    assert not gruyere.is_enabled()
    print(gruyere.disable_reason())
"""
    late = phantom.run("", code=code, **settings(WHEN="late"))
    assert (late.code, late.out.strip()) == (0, "native"), late.err
    other = phantom.run("", code=code, **settings(WHEN="then"))
    assert other.code == 0 and "change_current_allocator" in other.out, other.err
    assert other.err.count("GruyereWarning: Gruyère was replaced by another allocator") == 1


def test_what_one_allocates_the_deleter_frees_once_and_nothing_for_no_bytes(phantom):
    """From Python; the pointer, its context and its deleter themselves are compared in
    test_native_door_cpp.py."""
    through(phantom, code="""
empty = torch.empty(0, device="cuda")
block = tensor(3)
assert empty.data_ptr() == 0 and empty.untyped_storage().nbytes() == 0
# The data pointer that a storage has is freed by its deleter, once, whichever tensor goes last; an
# empty one by the same, which takes NULL.
view = block[5:]
del block, empty
assert torch.cuda.memory_allocated() == 3 * MIB
del view
assert torch.cuda.memory_allocated() == 0
# torch's functions that compare: those tensors are this allocator's.
block = tensor(1)
assert torch._C._has_Standard_Deleter(block.untyped_storage()._cdata)
# raw_alloc and raw_delete, and the allocator's own deleter on what they gave.
pointer = torch.cuda.caching_allocator_alloc(MIB)
assert torch.cuda.memory_allocated() == 2 * MIB
torch.cuda.caching_allocator_delete(pointer)
assert torch.cuda.memory_allocated() == MIB
assert torch.cuda.caching_allocator_alloc(0) == 0
gpu.check_books()
del block
gpu.check_nothing_is_left()
""")


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    phantom = Phantom(tmp_path_factory.mktemp("native"))
    return phantom.run("torch_stats", allocator="expandable").check().report


def test_statistics_are_those_of_torchs_own_allocator_at_every_step(phantom, native):
    report = through(phantom, "torch_stats").report
    ours = dict(report["told"])
    for what, theirs in native["told"]:
        assert ours[what].keys() >= theirs.keys() - {key for key in theirs if "private" in key}
        for key in (
            f"{number}.{pool}.{field}"
            for number in COUNTS + BYTES
            for pool in POOLS
            for field in FIELDS
        ):
            assert ours[what][key] == theirs[key], (what, key)
    assert (
        ours["end"]["allocated_bytes.all.current"]
        == report["live"]
        == report["outside"]["live_bytes"]
    )
    assert ours["end"]["reserved_bytes.all.current"] == report["reserved"]


@pytest.mark.parametrize("program", ["transformer", "several_streams", "threads", "graphs"])
def test_programs_keep_the_books(phantom, program):
    through(phantom, program)


def test_out_of_memory_is_torchs_own_with_our_text_after_everybody_was_asked(phantom):
    ran = through(phantom, "out_of_memory", PHANTOM_MEMORY="1GiB")
    assert (ran.report["type"], ran.report["arguments"], ran.report["again"]) == (
        "OutOfMemoryError",
        1,
        5,
    )
    assert ran.report["message"].startswith(
        "CUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 has "
    )
    assert "Gruyère holds" in ran.report["message"]
    assert 12 <= ran.report["blocks"] <= 16


def test_limits_observers_and_bounds_are_torchs(phantom):
    through(phantom, PHANTOM_MEMORY="1GiB", code="""
heard = []
torch._C._cuda_attach_out_of_memory_observer(lambda *told: heard.append(told))
assert "more than 1EB memory" in refused(
    lambda: torch.UntypedStorage(1 << 61, device="cuda"), kind=torch.OutOfMemoryError
)
assert heard == []
for fraction in (-0.1, 1.5):
    assert "fraction" in refused(lambda: torch._C._cuda_setMemoryFraction(fraction, 0))
torch.cuda.set_per_process_memory_fraction(0.5)
assert torch.cuda.get_per_process_memory_fraction() == 0.5
assert "Tried to allocate 600.00 MiB" in refused(tensor, 600, kind=torch.OutOfMemoryError)
((device, asked, limit, free),) = heard
assert (device, asked, limit) == (0, 600 * MIB, 512 * MIB) and 0 < free <= 1 << 30
assert torch.cuda.memory_stats()["num_ooms"] == 1
torch.cuda.set_per_process_memory_fraction(1.0)
kept = tensor(400)
gpu.check_books()
assert "no such device" in refused(lambda: torch._C._cuda_memoryStats(5))
""")


def test_caching_can_be_turned_off_and_what_was_made_meanwhile_goes_back_to_cuda(phantom):
    through(phantom, code="""
before = tensor(2)
torch.cuda.memory.caching_allocator_enable(False)
plain = tensor(2)
assert gpu.phantom.phantom_plain(0) == 2 * MIB and torch.cuda.memory_allocated() == 2 * MIB
raw = [torch.cuda.caching_allocator_alloc(2 * MIB) for _ in range(2)]
assert gpu.phantom.phantom_plain(0) == 6 * MIB and torch.cuda.memory_allocated() == 2 * MIB
torch.cuda.caching_allocator_delete(raw[0])
torch.cuda.memory.caching_allocator_enable(True)
after = tensor(2)
raw.append(torch.cuda.caching_allocator_alloc(2 * MIB))
assert torch.cuda.memory_allocated() == 6 * MIB
# Each goes back to where it came from, whatever is set by then.
torch.cuda.caching_allocator_delete(raw[1])
torch.cuda.memory.caching_allocator_enable(False)
torch.cuda.caching_allocator_delete(raw[2])
torch.cuda.memory.caching_allocator_enable(True)
assert gpu.phantom.phantom_plain(0) == 2 * MIB and torch.cuda.memory_allocated() == 4 * MIB
del before, plain, after
assert gpu.phantom.phantom_plain(0) == 0 and torch.cuda.memory_allocated() == 0
gpu.check_nothing_is_left()
""")
    through(phantom, PYTORCH_NO_CUDA_MEMORY_CACHING="1", code="""
plain = tensor(2)
assert gpu.phantom.phantom_plain(0) == 2 * MIB and torch.cuda.memory_allocated() == 0
del plain
assert gpu.phantom.phantom_plain(0) == 0
""")


@pytest.mark.parametrize("history", [False, True])
def test_frees_after_everything_else_is_gone_are_silent(phantom, history):
    code = (HERE / "programs" / "late_frees.py").read_text()
    if history:
        # Stacks are asked for when there is no interpreter any more.
        code += (
            "\ntorch.cuda.memory._record_memory_history(stacks='all')\nsys.also_never_freed = "
            "torch.empty(1, device='cuda')\n"
        )
    ran = phantom.run(
        "", code=code, allocator="door", PHANTOM_EXIT="deinitialize", **settings()
    ).check()
    assert (ran.out, ran.err) == ("handler\n", "")


def test_the_profiler_hears_of_memory(phantom):
    # The phantom has no CUPTI, and says so.
    ran = through(phantom, check=False, code="""
from torch.profiler import ProfilerActivity, profile
with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True) as watched:
    block = tensor(8)
    del block
events = [
    event
    for event in watched.profiler.kineto_results.events()
    if event.name() == "[memory]" and "CUDA" in str(event.device_type())
]
assert [event.nbytes() for event in events] == [8 * MIB, -8 * MIB], [
    (event.nbytes(), event.device_type()) for event in events
]
print("heard")
""")
    assert (ran.code, ran.out.strip(), ran.books["misuse"]) == (0, "heard", []), ran.err


def test_the_profilers_memory_view_follows_what_is_live(phantom):
    """Its timeline of tensors by category, of a training step: as under torch's own allocator, and
    at no moment more than what is live."""
    code = """
from torch.profiler import ProfilerActivity, profile
model = torch.nn.Sequential(torch.nn.Linear(700, 900), torch.nn.Linear(900, 500)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
batch = torch.empty(64, 700, device="cuda")
before = torch.cuda.memory_allocated()
torch.cuda.reset_peak_memory_stats()
wanted = dict(profile_memory=True, record_shapes=True, with_stack=True)
with profile(activities=[ProfilerActivity.CPU], **wanted) as watched:
    for _ in range(2):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
torch._C._cuda_clearCublasWorkspaces()
memory = watched._memory_profile()
view = [
    (action.name, memory._categories.get(key, version), size)
    for _, action, (key, version), size in memory.timeline
    if key.device == torch.device("cuda:0")
]
counts, live, peak = {}, 0, 0
for action, category, size in view:
    counts[f"{action} {category}"] = counts.get(f"{action} {category}", 0) + 1
    live += {"PREEXISTING": size, "CREATE": size, "DESTROY": -size}.get(action, 0)
    peak = max(peak, live)
told = torch.cuda.max_memory_allocated()
print(json.dumps(dict(counts=counts, peak=peak, told=told)))
"""
    # The phantom has no CUPTI, and says so.
    ours = through(phantom, check=False, code=code)
    theirs = phantom.run(
        "", code="import json, torch\n" + code, allocator="expandable", PYTHONPATH=HERE / "programs"
    )
    assert ours.code == theirs.code == 0, ours.err + theirs.err
    assert ours.report == theirs.report
    events = {"CREATE Category.GRADIENT", "DESTROY Category.ACTIVATION"}
    assert events <= ours.report["counts"].keys()
    assert 0.9 * ours.report["told"] < ours.report["peak"] <= ours.report["told"]


def test_gpu_traces_hear_of_every_block(phantom):
    through(phantom, code="""
from torch.cuda import _gpu_trace
torch.cuda.init()
heard = []
torch._C._activate_gpu_trace()
_gpu_trace.register_callback_for_memory_allocation(
    lambda pointer: heard.append(("malloc", pointer))
)
_gpu_trace.register_callback_for_memory_deallocation(
    lambda pointer: heard.append(("free", pointer))
)
block = tensor(3)
pointer = block.data_ptr()
del block
assert heard == [("malloc", pointer), ("free", pointer)], heard
""")


def test_cudnns_benchmark_stays_as_the_program_wants_it(phantom):
    """What it asks for, `cacheInfo`, is called in test_native_door_cpp.py; there is no cuDNN
    here."""
    ran = through(phantom, code="""
torch.backends.cudnn.benchmark = True
assert torch.backends.cudnn.benchmark
tensor(1)
""")
    assert ran.err == ""
