"""The Python package behind torch's own allocator. torch 2.7 or newer."""

import pytest

from package import PRELUDE, report
from test_package import LIBRARY_NUMBERS

BEHIND = PRELUDE + LIBRARY_NUMBERS + """
def books():
    # What torch's own allocator holds, it has from the library.
    return torch.cuda.memory_reserved(), numbers().live
"""


@pytest.mark.parametrize("way", ["call", "variable", "launcher"])
def test_behind_torchs_allocator_its_segments_are_ours(installed, way):
    call = "gruyere.enable(mode='behind')\n" if way == "call" else ""
    code = (
        BEHIND
        + call
        + """
kept = [tensor(n) for n in (1, 3, 10, 40)]
other = []
import threading
thread = threading.Thread(target=lambda: other.append(tensor(30)))
thread.start()
thread.join()
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    other.append(tensor(12))
held = books()
statistics = torch.cuda.memory_stats()["allocated_bytes.all.current"]
"""
        + report(
            held="held",
            statistics="statistics",
            snapshot="len(torch.cuda.memory_snapshot())",
            enabled="gruyere.is_enabled()",
        )
    )
    installed.write("program.py", code)
    line = ["-m", "gruyere", "--mode", "behind"] if way == "launcher" else []
    ran = installed.python(
        *line, "program.py", GRUYERE_ENABLE="behind" if way == "variable" else None
    )
    torchs, ours = ran.report["held"]
    assert torchs == ours >= 96 << 20
    assert ran.report["statistics"] == 96 << 20
    assert ran.report["snapshot"] and ran.report["enabled"]
    assert ran.err == ""


def test_behind_blocks_that_streams_used_come_back(installed):
    code = BEHIND + """
gruyere.enable(mode="behind")
side = torch.cuda.Stream()
most = 0
for turn in range(200):
    block = tensor(20)
    block.record_stream(side)
    del block
    torch.cuda.synchronize()
    most = max(most, torch.cuda.memory_reserved())
""" + report(most="most")
    # Without a breath all 200 would wait for ever.
    assert installed.code(code).report["most"] <= 200 << 20


def test_behind_empty_cache_gives_segments_back(installed):
    code = BEHIND + """
gruyere.enable(mode="behind")
kept = tensor(1)
blocks = [tensor(20) for _ in range(10)]
del blocks
full = books()
torch.cuda.empty_cache()
""" + report(full="full", empty="books()")
    ran = installed.code(code)
    assert ran.report["full"][1] >= 200 << 20
    assert ran.report["empty"][0] == ran.report["empty"][1] == 2 << 20


def test_behind_out_of_memory_is_torchs_own_and_the_next_attempt_finds_what_was_cached(installed):
    code = BEHIND + """
gruyere.enable(mode="behind")
blocks = [tensor(20) for _ in range(20)]
del blocks
said = None
try:
    tensor(700)
except torch.OutOfMemoryError as error:
    said = str(error)
again = tensor(700).numel()
""" + report(said="said", again="again")
    ran = installed.code(code, PHANTOM_MEMORY="1GiB")
    assert ran.report["said"].startswith("CUDA out of memory. Tried to allocate 700.00 MiB.")
    assert ran.report["again"] == 700 << 20


def test_behind_graphs_pools_and_benchmark_stay_torchs(installed):
    code = (
        BEHIND
        + """
gruyere.enable(mode="behind")
torch.backends.cudnn.benchmark = True
pool = torch.cuda.MemPool()
with torch.cuda.use_mem_pool(pool):
    pooled = tensor(30)
side = torch.cuda.Stream()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    captured = tensor(40).zero_()
    # A breath or a turn is due, and must wait for the capture's end.
    for _ in range(4):
        captured.record_stream(side)
graph.replay()
in_graph = any(
    s["segment_pool_id"][0]
    for s in torch.cuda.memory_snapshot()
    if s["address"] <= captured.data_ptr() < s["address"] + s["total_size"]
)
del pooled, pool, captured, graph
gc.collect()
for _ in range(4):
    tensor(40).record_stream(side)
torch.cuda.synchronize()
torch.cuda.empty_cache()
"""
        + report(
            benchmark="torch.backends.cudnn.benchmark",
            in_graph="in_graph",
            left="torch.cuda.memory_reserved() <= 4 * MIB",
        )
    )
    ran = installed.code(code)
    assert ran.report == {"benchmark": True, "in_graph": True, "left": True}
    assert ran.warnings() == []


def test_behind_an_out_of_memory_in_a_capture_ends_the_capture_only(installed):
    code = BEHIND + """
gruyere.enable(mode="behind")
graph, said = torch.cuda.CUDAGraph(), None
try:
    with torch.cuda.graph(graph):
        first = torch.zeros(10, device="cuda")
        tensor(4000)
except torch.OutOfMemoryError as error:
    said = str(error)
after = tensor(100).numel()
""" + report(said="said", after="after")
    ran = installed.code(code, PHANTOM_MEMORY="1GiB")
    assert ran.report["said"].startswith("CUDA out of memory.") and ran.report["after"] == 100 << 20


def test_behind_serves_every_device_and_wakes_none(installed):
    code = BEHIND + """
import ctypes
gruyere.enable(mode="behind")
first = tensor(10)
asleep = not torch._C._cuda_hasPrimaryContext(1)
second = torch.empty(10 * MIB, dtype=torch.uint8, device="cuda:1")
""" + report(asleep="asleep", live="[numbers(0).live, numbers(1).live]")
    ran = installed.code(code, PHANTOM_DEVICES=2)
    assert ran.report == {"asleep": True, "live": [10 << 20, 10 << 20]}


@pytest.mark.parametrize(
    ("conf", "words"),
    [
        ("backend:cudaMallocAsync", ["cudaMallocAsync", "direct"]),
        ("expandable_segments:True", ["expandable_segments", "direct"]),
    ],
)
def test_behind_what_torch_cannot_route_is_refused(installed, conf, words):
    code = PRELUDE + """
try:
    gruyere.enable(mode="behind")
except gruyere.GruyereError as error:
    said = str(error)
""" + report(said="said", enabled="gruyere.is_enabled()")
    ran = installed.code(code, PYTORCH_CUDA_ALLOC_CONF=conf)
    assert not ran.report["enabled"]
    for word in words:
        assert word in ran.report["said"]


def test_behind_a_forked_child_leaves_the_parents_routing_alone(installed):
    code = BEHIND + """
gruyere.enable(mode="behind")
kept = tensor(10)
child = os.fork()
if child == 0:
    torch.cuda.empty_cache()
    raise SystemExit(7)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
more = tensor(10)
""" + report(code="code", held="books()")
    ran = installed.code(code)
    assert ran.report["code"] == 7
    assert ran.report["held"][0] == ran.report["held"][1] == 20 << 20
