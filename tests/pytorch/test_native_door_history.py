"""The history of blocks through the native door: torch's own recorder tells where each block came
from, in C++ and Python, on any thread."""

from door import through


def test_entries_and_live_blocks_say_where_they_came_from(phantom):
    through(phantom, code="""
record = torch.cuda.memory._record_memory_history
def traces():
    return torch.cuda.memory._snapshot()["device_traces"][0]
def innermost(entry):
    return entry["frames"][0]["name"] if entry["frames"] else None
assert not torch._C._cuda_isHistoryEnabled()
old = tensor(2)
record(stacks="python")
assert torch._C._cuda_isHistoryEnabled()
def makes():
    return tensor(3)
def frees(blocks):
    blocks.clear()
torch.cuda.memory._set_memory_metadata("epoch 7")
kept, gone = makes(), [makes()]
torch.cuda.memory._set_memory_metadata("")
frees(gone)
snapshot = torch.cuda.memory._snapshot()
entries = [
    entry
    for entry in snapshot["device_traces"][0]
    if entry["action"] in ("alloc", "free_requested", "free_completed")
]
assert [
    (
        entry["action"],
        entry["frames"][1]["name"] if entry["action"] == "alloc" else innermost(entry),
        entry["user_metadata"],
    )
    for entry in entries
] == [
    ("alloc", "makes", "epoch 7"),
    ("alloc", "makes", "epoch 7"),
    ("free_requested", "frees", ""),
    ("free_completed", "frees", ""),
], entries
assert all(entry["size"] == 3 * MIB and entry["compile_context"] == "N/A" for entry in entries)
import time
assert all(0 <= time.time() * 1e6 - entry["time_us"] < 60e6 for entry in entries)
# A live block from before the history has no frames, one from within it has those of its
# allocation.
blocks = {
    block["address"]: block for segment in snapshot["segments"] for block in segment["blocks"]
}
assert (
    blocks[kept.data_ptr()]["frames"][1]["name"] == "makes"
    and blocks[old.data_ptr()]["frames"] == []
)
assert {block["state"] for block in blocks.values()} <= {"active_allocated", "inactive"}
# Autograd's own threads are heard: their frames are C++'s, where those are asked for.
record(stacks="all", clear_history=True)
leaf = torch.ones(1 << 20, device="cuda", requires_grad=True)
(leaf * 2).sum().backward()
entries = traces()
assert any(
    any("autograd" in frame["name"] or ".so" in frame["filename"] for frame in entry["frames"])
    for entry in entries
    if entry["action"] == "alloc"
)
# Contexts of what is recorded: blocks alone, allocations, all. Of a free of which none is recorded,
# as torch tells it, that of its block.
for context, alloc, end in (
    ("state", None, None),
    ("alloc", "makes", "makes"),
    ("all", "makes", "frees"),
):
    record(context=context, stacks="python", clear_history=True)
    gone = [makes()]
    frees(gone)
    told = {
        entry["action"]: [frame["name"] for frame in entry.get("frames", ())] for entry in traces()
    }
    for action, name in (("alloc", alloc), ("free_requested", end), ("free_completed", end)):
        assert (name in told[action][:2]) if name else not told[action], (context, told)
record(stacks="python", clear_history=True, max_entries=10)
for _ in range(50):
    makes()
assert len(traces()) == 10
# A free knows where its block came from when the allocation is no entry any more.
record(context="alloc", stacks="python", clear_history=True, max_entries=10)
gone = [makes()]
place = gone[0].data_ptr()
for _ in range(20):
    elsewhere = torch.empty(1000, dtype=torch.uint8, device="cuda")
frees(gone)
entries = traces()
told = [entry for entry in entries if entry["addr"] == place]
assert [entry["action"] for entry in told] == ["free_requested", "free_completed"], told
assert all(entry["frames"][1]["name"] == "makes" for entry in told), told
# Sizes are those that were asked for.
assert {entry["size"] for entry in entries} == {1000, 3 * MIB}, entries
of = {
    block["address"]: block
    for segment in torch.cuda.memory._snapshot()["segments"]
    for block in segment["blocks"]
}
block = of[elsewhere.data_ptr()]
assert (block["requested_size"], block["size"]) == (1000, 1024)
del elsewhere
record(stacks="python", clear_history=True, skip_actions=["free_requested", "free_completed"])
makes()
assert {entry["action"] for entry in traces()} <= {
    "alloc",
    "segment_alloc",
    "segment_map",
    "segment_unmap",
    "segment_free",
}
assert "nothing" in refused(lambda: record(skip_actions=["nothing"]))
record(None)
assert not torch._C._cuda_isHistoryEnabled() and traces() == []
del kept, old, leaf
torch.cuda.memory._dump_snapshot("snapshot.pickle")
gpu.check_nothing_is_left()
""")


def test_contexts_that_no_entry_has_are_dropped_while_threads_allocate(phantom):
    """More requests than contexts are kept for, with a short history: what is kept must not grow
    with the requests. One in a thousand blocks stays, with its frames."""
    through(phantom, code="""
import resource, threading
torch.cuda.memory._record_memory_history(stacks="python", max_entries=1000)
kept = []
def work(mine):
    for at in range(70_000):
        block = torch.empty(1000, dtype=torch.uint8, device="cuda")
        if at % 1000 == 0:
            mine.append(block)
for round in range(3):
    threads = [threading.Thread(target=work, args=(kept,)) for _ in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    if round == 0:
        first = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
# Before the snapshot, which is large by itself. Unbounded, the contexts of half a million calls are
# more than 300 MB.
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - first
assert grown < 100_000, grown
snapshot = torch.cuda.memory._snapshot()
assert len(snapshot["device_traces"][0]) == 1000
blocks = {
    block["address"]: block for segment in snapshot["segments"] for block in segment["blocks"]
}
assert len(kept) == 420 and all(
    blocks[block.data_ptr()]["frames"][0]["name"] == "work" for block in kept
)
torch.cuda.memory._record_memory_history(None)
kept.clear()
gpu.check_nothing_is_left()
""")


def test_annotations_are_in_the_snapshot(phantom):
    through(phantom, code="""
torch.cuda.memory._record_memory_history(stacks="python", global_record_annotations=True)
with torch.autograd.profiler.record_function("a phase"):
    block = tensor(1)
found = torch.cuda.memory._snapshot()["external_annotations"]
assert any("a phase" in json.dumps(entry) for entry in found), found
torch.cuda.memory._record_memory_history(None)
""")
    # As many as of the history's entries.
    through(phantom, code="""
torch.cuda.memory._record_memory_history(
    stacks="python", global_record_annotations=True, max_entries=10
)
for step in range(50):
    with torch.autograd.profiler.record_function(f"step {step}"):
        pass
found = json.dumps(torch.cuda.memory._snapshot()["external_annotations"])
assert "step 49" in found and "step 39" not in found and found.count("step ") == 10, found
torch.cuda.memory._record_memory_history(None)
""")


def test_what_a_thread_says_of_itself_is_its_own(phantom):
    through(phantom, code="""
import threading
torch.cuda.memory._record_memory_history(stacks="python")
torch.cuda.memory._set_memory_metadata(
    "a very long name of the main thread's own, longer than a string keeps inside of itself"
)


def work():
    assert torch.cuda.memory._get_memory_metadata() == ""
    torch.cuda.memory._set_memory_metadata("another")
    block = tensor(3)
thread = threading.Thread(target=work)
thread.start()
thread.join()
block = tensor(2)
told = {
    entry["size"]: entry["user_metadata"][:6]
    for entry in torch.cuda.memory._snapshot()["device_traces"][0]
    if entry["action"] == "alloc"
}
assert told == {3 * MIB: "anothe", 2 * MIB: "a very"}, told
torch.cuda.memory._record_memory_history(None)
""")
