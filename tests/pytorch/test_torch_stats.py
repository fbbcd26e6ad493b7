"""torch's own memory functions under Gruyère: against torch's own allocator, against the record,
and against what they promise."""

import pytest

from conftest import GRUYERE, HERE, ROOT, Phantom

# What both allocators define, whatever segments they take memory in.
COUNTS = ("allocation", "active")
BYTES = ("allocated_bytes", "active_bytes", "requested_bytes")
POOLS = ("all", "small_pool", "large_pool")
FIELDS = ("current", "peak", "allocated", "freed")

PRELUDE = """
import torch, gpu
gpu.install()
from gruyere._torch.stats import install, memory_fraction
install()
# Older versions of torch have fewer functions: 2.8 came with the one, 2.9 with the other.
fraction = getattr(
    torch.cuda, "get_per_process_memory_fraction", lambda: memory_fraction(0)
)
accelerator = torch.accelerator if hasattr(torch._C, "_accelerator_getDeviceStats") else None
"""


def mended(phantom, program="", code=None, **settings):
    """Runs a program with torch's functions mended."""
    path = f"{HERE / 'programs'}:{ROOT / 'python_loader'}"
    code = code and PRELUDE + code
    return phantom.run(
        program, code=code, allocator="hooked", PYTHONPATH=path, GRUYERE_LIBRARY=GRUYERE, **settings
    ).check()


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    phantom = Phantom(tmp_path_factory.mktemp("native"))
    return {
        kind: phantom.run("torch_stats", allocator=kind).check().report
        for kind in ("native", "expandable")
    }


@pytest.mark.parametrize(
    "conf", ["", "backing:pool", "backing:fixed", "backing:passthrough", "record:off"]
)
def test_counts_and_bytes_are_those_of_torchs_own_allocator_at_every_step(phantom, native, conf):
    ours = dict(mended(phantom, "torch_stats", GRUYERE_CONF=conf).report["told"])
    # Expandable segments cut every block at 512 B, as Gruyère does; torch's default keeps up to 1
    # MiB more with a large block.
    for kind, numbers in (("expandable", COUNTS + BYTES), ("native", (*COUNTS, "requested_bytes"))):
        for what, theirs in native[kind]["told"]:
            for key in (
                f"{number}.{pool}.{field}"
                for number in numbers
                for pool in POOLS
                for field in FIELDS
            ):
                assert ours[what][key] == theirs[key], (kind, what, key)


def test_what_torch_says_is_what_the_record_and_the_driver_say(phantom):
    report = mended(phantom, "torch_stats").report
    last = dict(report["told"])["end"]
    assert last["allocated_bytes.all.current"] == report["live"] == report["outside"]["live_bytes"]
    assert (
        last["reserved_bytes.all.current"]
        == report["reserved"]
        == report["outside"]["gauges"]["reserved_bytes"]
    )
    before, after = dict(report["told"])["step 3"], dict(report["told"])["counts reset"]
    assert (
        before["allocation.all.allocated"] + last["allocation.all.allocated"] == report["mallocs"]
    )
    assert after["allocation.all.allocated"] == after["num_device_alloc"] == 0
    assert after["allocation.all.current"] == before["allocation.all.current"] > 0


def test_every_key_that_torch_gives_is_there_and_summaries_are_as_torchs(phantom, native):
    ours = mended(phantom, "torch_stats").report
    theirs = native["native"]
    assert set(theirs["told"][0][1]) <= set(ours["told"][0][1])
    for mine, torchs in zip(ours["summary"], theirs["summary"]):
        assert [line.split("|")[1] for line in mine.splitlines()] == [
            line.split("|")[1] for line in torchs.splitlines()
        ]
    for report in (ours, theirs):
        assert (
            report["allocated_peak"][0] <= report["allocated_peak"][1] <= report["reserved_peak"][1]
        )
        assert report["reserved_peak"][0] <= report["reserved_peak"][1]
        for _, stats in report["told"]:
            for number in {key.rpartition(".")[0] for key in stats if "." in key}:
                assert 0 <= stats[f"{number}.current"] <= stats[f"{number}.peak"]
            for number in (*COUNTS, *BYTES, "segment", "reserved_bytes"):
                for field in ("current", "allocated"):
                    parts = (
                        stats[f"{number}.small_pool.{field}"],
                        stats[f"{number}.large_pool.{field}"],
                    )
                    whole = stats[f"{number}.all.{field}"]
                    assert (
                        whole == sum(parts)
                        if field == "current" or number in (*COUNTS, *BYTES)
                        else whole <= sum(parts)
                    )


def test_nothing_is_said_and_nothing_started_before_cuda_is_in_use(phantom):
    code = """
import os
assert (
    torch.cuda.memory_stats() == {}
    and torch.cuda.memory_allocated() == 0
    and torch.cuda.memory_snapshot() == []
)
assert (
    accelerator is None or accelerator.memory_stats() == {} and accelerator.memory_reserved() == 0
)
assert not torch.cuda.is_initialized()
child = os.fork()
if child == 0:
    kept = torch.ones(3, device="cuda")
    os._exit(0 if torch.cuda.memory_allocated() == 512 else 1)
assert os.waitpid(child, 0)[1] == 0
torch.ones(3, device="cuda")
gpu.report(allocated=torch.cuda.memory_allocated())
"""
    assert mended(phantom, code=code).report["allocated"] == 0


def test_a_forked_child_of_a_process_that_uses_cuda_is_told_so(phantom):
    code = """
import os
kept = torch.ones(3, device="cuda")
child = os.fork()
if child == 0:
    try:
        torch._C._cuda_memoryStats(0)
    except RuntimeError as error:
        os._exit(0 if "spawn" in str(error) else 2)
    os._exit(1)
gpu.report(code=os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert mended(phantom, code=code).report["code"] == 0


def test_the_fraction_is_what_was_set_and_holds(phantom):
    code = """
assert fraction() == 1.0
torch.cuda.set_per_process_memory_fraction(0.25)
assert fraction() == 0.25
try:
    torch.empty(300 << 20, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    said = str(error)
torch.cuda.set_per_process_memory_fraction(1.0)
kept = torch.empty(300 << 20, dtype=torch.uint8, device="cuda")
stats = torch.cuda.memory_stats()
free, total = torch.cuda.mem_get_info()
assert total - free >= torch.cuda.memory_reserved() >= 300 << 20
gpu.report(said=said, ooms=stats["num_ooms"], retries=stats["num_alloc_retries"])
"""
    report = mended(phantom, code=code, PHANTOM_MEMORY="1GiB").report
    assert report["said"].startswith("CUDA out of memory. Tried to allocate 300.00 MiB. GPU 0")
    assert (report["ooms"], report["retries"]) == (1, 1)


# What is asked of a fraction, under Gruyère and under torch's own allocator. That names a device by
# the character of its number, so of those errors only the kind is compared.
FRACTIONS = """
kept = torch.ones(3, device="cuda")
said = []
for function, arguments in (
    (torch.cuda.set_per_process_memory_fraction, (1,)),
    (torch.cuda.set_per_process_memory_fraction, (1.5,)),
    (torch.cuda.set_per_process_memory_fraction, (-0.25,)),
    (torch.cuda.set_per_process_memory_fraction, (float("nan"),)),
    (torch.cuda.set_per_process_memory_fraction, (0.5, "cpu")),
    (torch.cuda.set_per_process_memory_fraction, (0.5, torch.device("cuda"))),
    (torch.cuda.set_per_process_memory_fraction, (0.5, 7)),
    (torch.cuda.set_per_process_memory_fraction, (0.5, "cuda:7")),
    (torch.cuda.set_per_process_memory_fraction, (0.5, "cuda:0")),
    (torch._C._cuda_setMemoryFraction, (1.5, 0)),
    (torch._C._cuda_setMemoryFraction, (-1e-7, 0)),
    (torch._C._cuda_setMemoryFraction, (float("inf"), 0)),
    (torch._C._cuda_setMemoryFraction, (0.5, 7)),
    (torch._C._cuda_setMemoryFraction, (1, 0)),
    (torch._C._cuda_setMemoryFraction, (0, 0)),
):
    try:
        function(*arguments)
    except Exception as error:
        names_it = arguments[-1] in (7, "cuda:7")
        said.append([type(error).__name__, None if names_it else str(error).splitlines()[0]])
    else:
        said.append(["set", round(torch._C._cuda_getMemoryFraction(0), 6)])
"""


def test_a_fraction_has_torchs_own_bounds_and_errors(phantom):
    code = FRACTIONS + "gpu.report(said=said)\n"
    ours = mended(phantom, code=code).report["said"]
    theirs = phantom.run(
        "", code="import torch, gpu\n" + code, PYTHONPATH=HERE / "programs"
    ).check().report["said"]
    assert ours == theirs
    assert ["ValueError", "Invalid fraction value: 1.5. Allowed range: 0~1"] in ours
    assert ["RuntimeError", "invalid fraction:inf. Please set within [0, 1]."] in ours


def test_a_size_that_no_program_means_is_refused_in_torchs_words_and_counts_as_no_attempt(phantom):
    code = """
kept = torch.ones(3, device="cuda")
said = []
for bytes_ in (1 << 60, (1 << 63) - 1):
    try:
        torch.empty(bytes_, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        said.append(str(error).splitlines()[0])
ooms = torch.cuda.memory_stats()["num_ooms"]
try:
    torch.empty((1 << 60) - 1, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    said.append(str(error)[: str(error).index("GiB")])
gpu.report(said=said, ooms=[ooms, torch.cuda.memory_stats()["num_ooms"]])
"""
    ours = mended(phantom, code=code).report
    theirs = phantom.run(
        "", code="import torch, gpu\n" + code, PYTHONPATH=HERE / "programs"
    ).check().report
    assert ours == theirs
    assert ours["ooms"] == [0, 1]
    assert ours["said"][0] == "CUDA out of memory. Tried to allocate more than 1EB memory."


def test_the_accelerator_says_what_cuda_says(phantom):
    code = """
kept = [torch.empty(n << 19, dtype=torch.uint8, device="cuda") for n in range(1, 9)]
del kept[::2]
for accelerator, cuda in (
    (torch.accelerator.memory_allocated, torch.cuda.memory_allocated),
    (torch.accelerator.max_memory_allocated, torch.cuda.max_memory_allocated),
    (torch.accelerator.memory_reserved, torch.cuda.memory_reserved),
    (torch.accelerator.max_memory_reserved, torch.cuda.max_memory_reserved),
    (torch.accelerator.memory_stats, torch.cuda.memory_stats),
):
    assert accelerator() == cuda() == accelerator(0), accelerator
info = getattr(torch.accelerator, "get_memory_info", torch.cuda.mem_get_info)
free, total = info()
assert (free, total) == torch.cuda.mem_get_info() and total - free >= torch.cuda.memory_reserved()
peak = torch.cuda.max_memory_allocated()
torch.accelerator.reset_peak_memory_stats()
torch.accelerator.reset_accumulated_memory_stats()
assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated() < peak
assert torch.cuda.memory_stats()["allocation.all.allocated"] == 0
before = torch.cuda.memory_reserved()
kept.clear()
torch.accelerator.empty_cache()
after, held = torch.cuda.memory_reserved(), gpu.stats().reserved
gpu.report(before=before, after=after, given=info()[0] - free, held=held)
"""
    report = mended(phantom, code=code).report
    assert report["given"] == report["before"] > 0 == report["after"] == report["held"], report


def test_a_device_that_is_not_there_is_an_error_that_names_it(phantom):
    code = """
torch.ones(3, device="cuda")
said = []
for call in (
    torch.cuda.memory_stats,
    torch.cuda.reset_peak_memory_stats,
    torch.cuda.reset_accumulated_memory_stats,
):
    try:
        call(7)
    except (RuntimeError, AssertionError, ValueError) as error:
        said.append(str(error))
gpu.report(said=said)
"""
    said = mended(phantom, code=code).report["said"]
    assert len(said) == 3 and all("7" in text for text in said)


@pytest.mark.parametrize("conf", ["", "backing:pool", "backing:passthrough"])
def test_a_snapshot_tiles_what_is_held_and_memory_viz_opens_the_file(phantom, tmp_path, conf):
    code = """
import pickle, sys
from torch.cuda import _memory_viz
torch.cuda.memory._record_memory_history()
def work():
    kept = [torch.empty(n * 1000, device="cuda") for n in range(1, 400)]
    return [tensor + 1 for tensor in kept[::3]]
kept = work()
side = torch.cuda.Stream()
kept[5].record_stream(side)
torch.cuda.memory._dump_snapshot("snapshot.pickle")
with open("snapshot.pickle", "rb") as file:
    raw = file.read()
snapshot = pickle.loads(raw)
# A plain dictionary in protocol 4: what viewers read.
assert raw[:2] == b"\\x80\\x04" and b"gruyere." not in raw
stats = torch.cuda.memory_stats()
segments = snapshot["segments"]
for segment in segments:
    at = segment["address"]
    for block in segment["blocks"]:
        assert block["address"] == at
        at += block["size"]
    assert at == segment["address"] + segment["total_size"]
blocks = [block for segment in segments for block in segment["blocks"]]
allocated = [block for block in blocks if block["state"] == "active_allocated"]
assert (
    sum(block["size"] for block in allocated)
    == sum(segment["allocated_size"] for segment in segments)
    == torch.cuda.memory_allocated()
)
assert sum(block["requested_size"] for block in allocated) == stats["requested_bytes.all.current"]
assert len(allocated) == stats["allocation.all.current"] == len(kept)
assert sum(segment["total_size"] for segment in segments) <= torch.cuda.memory_reserved()
assert {block["address"] for block in allocated} == {tensor.data_ptr() for tensor in kept}
assert all(
    block["frames"][0]["name"] == "<listcomp>" and block["frames"][1]["name"] == "work"
    for block in allocated
), allocated[0]
# memory() wants a script from the internet to draw with: what it would be given will do.
pages = _memory_viz.trace_plot(snapshot), _memory_viz.segment_plot(snapshot)
assert all("MemoryViz" in page and len(page) > 10_000 for page in pages)
drawn = (
    _memory_viz.memory(snapshot, lambda lines: lines),
    _memory_viz.segments(snapshot, lambda lines: lines),
)
assert "work" in drawn[0] and drawn[1]
assert _memory_viz.segsum(snapshot) and _memory_viz.trace(snapshot)
gpu.check_books()
gpu.report(segments=len(segments), traces=len(snapshot["device_traces"][0]))
"""
    report = mended(phantom, code=code, GRUYERE_CONF=conf).report
    # 399 blocks and a third of that; 399 freed in two entries each; what came from the driver.
    assert report["traces"] >= 399 + 133 + 2 * 399


@pytest.mark.parametrize(
    "conf",
    [
        "",
        "limit:300MiB,headroom:0,slack:1%",
        "backing:pool",
        "backing:fixed",
        "backing:passthrough",
        "record:off",
    ],
)
def test_the_timeline_of_reserved_memory_ends_at_what_is_held(phantom, conf):
    code = """
import random
from torch.cuda import _memory_viz
torch.cuda.memory._record_memory_history()
CAME, WENT = ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")
draw = random.Random(1)

def add(rows, start, end):
    # Rows of memory as memory_viz keeps them: neighbours are joined.
    assert all(end <= other or start >= over for other, over in rows), "came twice"
    for row in [row for row in rows if row[1] == start or row[0] == end]:
        rows.remove(row)
        start, end = min(start, row[0]), max(end, row[1])
    rows.append((start, end))

def take(rows, start, end):
    (row,) = [row for row in rows if row[0] <= start and end <= row[1]]
    rows.remove(row)
    rows.extend(part for part in ((row[0], start), (end, row[1])) if part[0] < part[1])

def rows_of(segments):
    rows = []
    for segment in segments:
        add(rows, segment["address"], segment["address"] + segment["total_size"])
    return sorted(rows)

def check():
    snapshot = torch.cuda.memory._snapshot()
    told = rows_of(snapshot["segments"])
    # Forwards from nothing, and backwards from the snapshot, as memory_viz goes.
    forwards, backwards, peak, held = [], list(told), 0, 0
    trace = snapshot["device_traces"][0]
    for entry in trace:
        if entry["action"] in (*CAME, *WENT):
            (add if entry["action"] in CAME else take)(
                forwards, entry["addr"], entry["addr"] + entry["size"]
            )
            held += entry["size"] * (1 if entry["action"] in CAME else -1)
            peak = max(peak, held)
            assert entry["stream"] == 0
        elif entry["action"] == "alloc":
            assert any(
                start <= entry["addr"] and entry["addr"] + entry["size"] <= end
                for start, end in forwards
            )
    assert sorted(forwards) == told
    for entry in reversed(trace):
        if entry["action"] in (*CAME, *WENT):
            (take if entry["action"] in CAME else add)(
                backwards, entry["addr"], entry["addr"] + entry["size"]
            )
    assert backwards == []
    # A few pages may lie between two moves.
    assert held <= torch.cuda.memory_reserved() and peak <= torch.cuda.max_memory_reserved(), (
        held,
        peak,
    )
    return snapshot, held, peak

kept, counts = [], {}
for turn in range(500):
    if kept and (len(kept) > 12 or draw.random() < 0.4):
        kept.pop(draw.randrange(len(kept)))
    else:
        kept.append(
            torch.empty(
                draw.choice([draw.randrange(1, 5000), draw.randrange(1, 30 << 20)]),
                dtype=torch.uint8,
                device="cuda",
            )
        )
    if turn % 100 == 99:
        check()
snapshot, held, peak = check()
assert peak >= 0.95 * torch.cuda.max_memory_reserved(), (peak, torch.cuda.max_memory_reserved())
pages = _memory_viz.trace_plot(snapshot), _memory_viz.segment_plot(snapshot)
assert all("MemoryViz" in page for page in pages)
assert _memory_viz.trace(snapshot) and _memory_viz.segsum(snapshot)
del kept[:]
torch.cuda.empty_cache()
empty = check()[1]
for entry in torch.cuda.memory._snapshot()["device_traces"][0]:
    counts[entry["action"]] = counts.get(entry["action"], 0) + 1
framed = all(entry["frames"] for entry in snapshot["device_traces"][0] if entry["action"] in CAME)
gpu.report(counts=counts, empty=empty, reserved=torch.cuda.memory_reserved(), framed=framed)
"""
    report = mended(phantom, code=code, GRUYERE_CONF=conf).report
    assert report["empty"] == report["reserved"] == 0
    assert report["framed"], "the stack of the call that memory came for"
    stitched = not conf.startswith("backing")
    counts = report["counts"]
    assert counts["segment_map" if stitched else "segment_alloc"] > 1
    assert counts["segment_unmap" if stitched else "segment_free"] > 1
    assert not {"segment_alloc", "segment_map"} <= set(counts)


def test_a_row_of_pages_is_of_the_type_of_the_blocks_in_it_as_torchs_are(phantom):
    code = """
import collections
draw = [1000 + 997 * n % 60_000 for n in range(3000)]
kept = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in draw]
# Holes between them, and empty pages: torch's segments of small blocks have those too.
del kept[500:1500], kept[::3]

def types():
    found = collections.Counter()
    for segment in torch.cuda.memory_snapshot():
        used = [block["size"] for block in segment["blocks"] if block["state"] != "inactive"]
        if used:
            found[segment["segment_type"]] += len(used)
            wanted = "small" if max(used) <= 1 << 20 else "large"
            assert segment["segment_type"] == wanted, (segment["segment_type"], max(used))
    return found

small = types()
large = [torch.empty(n << 20, dtype=torch.uint8, device="cuda") for n in (2, 5, 30)]
both = types()
count = len(kept)
kept.clear()
gpu.report(small=small, both=both, alone=types(), count=count)
"""
    reports = [
        mended(phantom, code=code, GRUYERE_CONF=conf).report
        for conf in ("", "backing:fixed", "backing:passthrough")
    ]
    torchs = phantom.run(
        "", code="import torch, gpu\n" + code, allocator="expandable", PYTHONPATH=HERE / "programs"
    )
    for report in (*reports, torchs.check().report):
        assert report["small"] == {"small": report["count"]}
        assert report["both"]["large"] >= 3
        assert {type_ for type_, blocks in report["alone"].items() if blocks} == {"large"}


def test_a_block_that_waits_for_a_stream_is_pending_in_the_snapshot(phantom):
    code = """
side = torch.cuda.Stream()
kept = torch.empty(5 << 20, dtype=torch.uint8, device="cuda")
kept.record_stream(side)
address, size = kept.data_ptr(), 5 << 20
del kept
stats = torch.cuda.memory_stats()
states = {
    block["address"]: block["state"]
    for segment in torch.cuda.memory_snapshot()
    for block in segment["blocks"]
}
active = stats["active_bytes.all.current"] - stats["allocated_bytes.all.current"]
torch.cuda.empty_cache()
gpu.report(
    state=states.get(address),
    waiting=active,
    after=torch.cuda.memory_stats()["active_bytes.all.current"],
)
"""
    report = mended(phantom, code=code).report
    assert report == {"state": "active_pending_free", "waiting": 5 << 20, "after": 0}


def test_memory_of_a_graph_is_told_by_its_pool(phantom):
    code = """
import inspect
x = torch.zeros(1 << 20, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = x + 1
    small = y[:10] * 2
pool = tuple(graph.pool())
segments = [
    segment for segment in torch.cuda.memory_snapshot() if tuple(segment["segment_pool_id"]) == pool
]
# torch 2.7 and older tell of everything at once.
only = (
    torch.cuda.memory_snapshot(pool)
    if inspect.signature(torch.cuda.memory_snapshot).parameters
    else segments
)
held = sum(segment["total_size"] for segment in segments)
nested = torch.cuda.memory_stats_as_nested_dict()["reserved_bytes_by_private_pools"]
told = nested[pool]["all"]["current"]
parts = nested[pool]["small_pool"]["current"], nested[pool]["large_pool"]["current"]
flat = {key: value for key, value in torch.cuda.memory_stats().items() if "private" in key}
gpu.report(
    held=held,
    only=sum(segment["total_size"] for segment in only),
    told=told,
    parts=parts,
    flat=flat,
    addresses=[y.data_ptr(), small.data_ptr()],
    blocks=[
        block["address"]
        for segment in segments
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    ],
)
del y, small
graph.reset()
"""
    report = mended(phantom, code=code).report
    assert report["held"] == report["only"] == report["told"] == sum(report["parts"]) > 0
    assert min(report["parts"]) > 0
    assert set(report["addresses"]) <= set(report["blocks"])
    assert report["told"] in report["flat"].values()


def test_the_history_is_as_long_and_as_detailed_as_was_asked(phantom):
    code = """
import inspect
known = inspect.signature(torch.cuda.memory._record_memory_history_impl).parameters
left_out = ()

def record(*arguments, **keywords):
    # Older versions of torch do not know these two.
    global left_out
    if "clear_history" not in known and keywords.pop("clear_history", False):
        torch.cuda.memory._record_memory_history(None)
    left_out = () if "skip_actions" in known else keywords.pop("skip_actions", ())
    torch.cuda.memory._record_memory_history(*arguments, **keywords)

def traces():
    return [
        trace
        for trace in torch.cuda.memory._snapshot()["device_traces"][0]
        if trace["action"] not in left_out
    ]


def made():
    return torch.empty(1000, device="cuda")

# Before CUDA is in use there are no devices to tell of: asking for them would keep children from
# being forked.
assert torch.cuda.memory._snapshot()["device_traces"] == []
torch.cuda.init()
assert not torch._C._cuda_isHistoryEnabled() and traces() == []
record(max_entries=5)
assert torch._C._cuda_isHistoryEnabled()
for _ in range(10):
    made()
assert len(traces()) == 5, len(traces())
record("all", context=None, clear_history=True)
kept = made()
assert [trace["frames"] for trace in traces()] == [[]]
record("state", clear_history=True)
other = made()
assert traces() == []
blocks = {
    block["address"]: block
    for segment in torch.cuda.memory_snapshot()
    for block in segment["blocks"]
}
assert (
    blocks[other.data_ptr()]["frames"][0]["name"] == "made"
    and blocks[kept.data_ptr()]["frames"] == []
)
record("all", context="alloc", clear_history=True, skip_actions=["free_completed"])
made()
assert [(trace["action"], bool(trace["frames"])) for trace in traces()] == [
    ("alloc", True),
    ("free_requested", False),
]
assert traces()[0]["frames"][0]["line"] == made.__code__.co_firstlineno + 1
# torch's own device mode lies above ours when the history ends.
with torch.device("cuda"):
    record(None)
    assert torch.empty(3).is_cuda
assert traces() == [] and not torch._C._cuda_isHistoryEnabled()
assert torch.overrides._get_current_function_mode_stack() == []
try:
    record("everything")
except RuntimeError as error:
    said = str(error)
gpu.report(said=said)
"""
    assert "everything" in mended(phantom, code=code).report["said"]


def test_threads_and_snapshots_beside_a_history_neither_stop_nor_lose_anything(phantom):
    code = """
import gc, threading
torch.cuda.memory._record_memory_history()
def work(seed):
    for i in range(400):
        tensor = torch.empty(1000 + seed * i, device="cuda", requires_grad=True)
        (tensor * 2).sum().backward()
threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
for thread in threads:
    thread.start()
while any(thread.is_alive() for thread in threads):
    torch.cuda.memory._snapshot()
    gc.collect()
for thread in threads:
    thread.join()
traces = torch.cuda.memory._snapshot()["device_traces"][0]
counts = {
    action: sum(trace["action"] == action for trace in traces)
    for action in ("alloc", "free_requested", "free_completed")
}
stats = torch.cuda.memory_stats()
gpu.report(
    counts=counts, allocated=stats["allocation.all.allocated"], freed=stats["allocation.all.freed"]
)
"""
    report = mended(phantom, code=code).report
    assert report["counts"] == {
        "alloc": report["allocated"],
        "free_requested": report["freed"],
        "free_completed": report["freed"],
    }
    assert report["allocated"] >= 4 * 400 * 3


def test_observers_hear_of_an_out_of_memory_before_the_program_does(phantom):
    code = """
heard = []
torch.cuda.memory._record_memory_history()
torch._C._cuda_attach_out_of_memory_observer(lambda *facts: heard.append(("first", *facts)))
torch._C._cuda_attach_out_of_memory_observer(
    lambda *_: heard.append(len(torch.cuda.memory._snapshot()["device_traces"][0]))
)
kept = torch.ones(3, device="cuda")
for size in (2 << 30, 3 << 30):
    try:
        torch.empty(size, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        heard.append("handler")
torch.OutOfMemoryError("not the allocator's")
traces = torch.cuda.memory._snapshot()["device_traces"][0]
gpu.report(heard=heard, ooms=[trace for trace in traces if trace["action"] == "oom"])
"""
    report = mended(phantom, code=code, PHANTOM_MEMORY="1GiB").report
    assert [what if isinstance(what, str) else type(what).__name__ for what in report["heard"]] == [
        "list",
        "int",
        "handler",
    ] * 2
    kind, device, asked, total, free = report["heard"][0]
    assert (device, asked, total) == (0, 2 << 30, 1 << 30) and 0 < free < 1 << 30
    assert [trace["size"] for trace in report["ooms"]] == [2 << 30, 3 << 30]
    assert all(
        "addr" not in trace and trace["device_free"] > 0 and trace["frames"]
        for trace in report["ooms"]
    )
