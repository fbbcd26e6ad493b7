"""Checkpoints of a graph's pool through the native door: torch's own functions, and the CUDA graph
trees that are built on them."""

import json

import pytest

from door import PRELUDE, settings, through

CAPTURE = """
take = torch._C._cuda_getCheckpointState
KIB = 1 << 10


def block(size):
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def captured(function, pool=None, stream=None):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        outputs = function()
    return graph, list(outputs)


def restore(state, stale=(), alive=()):
    of = lambda tensors: [tensor.untyped_storage()._cdata for tensor in tensors]
    torch._C._cuda_setCheckpointPoolState(0, state, of(stale), of(alive))


def segments(pool):
    found = torch.cuda.memory_snapshot()
    return [one for one in found if tuple(one["segment_pool_id"]) == tuple(pool)]


def tiles(segment):
    return [(one["size"], one["state"]) for one in segment["blocks"]]


def layout(pool):
    return {one["address"]: (one["total_size"], tiles(one)) for one in segments(pool)}


def live(pool):
    return sorted(
        one["address"]
        for segment in segments(pool)
        for one in segment["blocks"]
        if one["state"] == "active_allocated"
    )


def pointers(tensors):
    return sorted(tensor.data_ptr() for tensor in tensors)


def is_exactly(pool, tensors):
    return torch._C._cuda_checkPoolLiveAllocations(0, pool, set(pointers(tensors)))


def metadata(tensor):
    return {
        "nbytes": tensor.untyped_storage().nbytes(),
        "data_ptr": tensor.untyped_storage().data_ptr(),
        "size": tensor.shape,
        "stride": tensor.stride(),
        "dtype": tensor.dtype,
        "device": tensor.device,
        "storage_offset": tensor.storage_offset(),
    }


def rebuilt(of):
    storage = torch._C._construct_storage_from_data_pointer(
        of["data_ptr"], of["device"], of["nbytes"]
    )
    return torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(of, storage)
"""


def test_a_state_that_is_restored_at_once_changes_nothing(phantom):
    through(phantom, code=CAPTURE + """
sizes = [1, 700, 5000, 300 * KIB, 900 * KIB, 3 * MIB, 40 * MIB]
graph, outputs = captured(lambda: [block(size) for size in sizes])
pool = graph.pool()
state, before, count = take(0, pool), layout(pool), torch.cuda.memory_stats()
assert live(pool) == pointers(outputs)
restore(state)
assert layout(pool) == before and is_exactly(pool, outputs)
after = torch.cuda.memory_stats()
moved = [name for name in count if after[name] != count[name] and "time" not in name]
assert not moved, moved
# The tensors still free their blocks, one by one.
while outputs:
    outputs.pop()
    assert is_exactly(pool, outputs) and live(pool) == pointers(outputs)
graph.replay()
del graph, state
gpu.check_nothing_is_left(captured=True)
""")


def test_what_a_later_graph_has_allocated_is_freed_and_its_tensors_let_go_of_it(phantom):
    through(phantom, code=CAPTURE + """
graph, outputs = captured(lambda: [block(512), block(3 * MIB)])
pool = graph.pool()
state, before = take(0, pool), layout(pool)
second, later = captured(lambda: [block(600), block(5 * MIB), block(70 * KIB)], pool)
assert live(pool) == pointers(outputs + later)
restore(state, later)
assert is_exactly(pool, outputs)
assert all(not torch._C._has_Standard_Deleter(one.untyped_storage()._cdata) for one in later)
assert all(torch._C._has_Standard_Deleter(one.untyped_storage()._cdata) for one in outputs)
# What the pool has taken since is free, and may lie right behind what it had.
after = layout(pool)
for address, (_, told) in before.items():
    known = [one for one in told if one[1] != "inactive"]
    assert [one for one in after[address][1] if one[1] != "inactive"] == known, (before, after)
# Their memory may be somebody else's by now: they free nothing.
third, others = captured(lambda: [block(600), block(5 * MIB)], pool)
frees = torch.cuda.memory_stats()["allocation.all.freed"]
del later
assert torch.cuda.memory_stats()["allocation.all.freed"] == frees
assert live(pool) == pointers(outputs + others)
del outputs, others, graph, second, third, state
gpu.check_nothing_is_left(captured=True)
""")


def test_tensors_that_died_are_live_again_where_they_were(phantom):
    through(phantom, code=CAPTURE + """
graph, outputs = captured(lambda: [block(512), block(512), block(900 * KIB), block(6 * MIB)])
pool = graph.pool()
state, before, where = take(0, pool), layout(pool), pointers(outputs)
held, asked = torch.cuda.memory_reserved(), torch.cuda.memory_stats()["requested_bytes.all.current"]
del outputs
assert live(pool) == []
restore(state)
assert live(pool) == where and layout(pool) == before
assert torch.cuda.memory_reserved() == held
assert torch.cuda.memory_stats()["requested_bytes.all.current"] == asked
for pointer in list(where):
    torch._C._cuda_cudaCachingAllocator_raw_delete(pointer)
    where.remove(pointer)
    assert live(pool) == where
graph.replay()
del graph, state
gpu.check_nothing_is_left(captured=True)
""")


def test_tensors_that_were_made_over_the_memory_own_it_after_a_restore(phantom):
    """A replay's outputs own nothing until the pool is restored: then they get real deleters."""
    through(phantom, code=CAPTURE + """
graph, outputs = captured(lambda: [block(512), block(70 * KIB), block(20 * MIB)])
pool = graph.pool()
state, kept = take(0, pool), [metadata(one) for one in outputs]
del outputs
graph.replay()
outputs = [rebuilt(one) for one in kept]
deleters = lambda: [
    torch._C._has_Standard_Deleter(one.untyped_storage()._cdata) for one in outputs
]
assert deleters() == [False] * 3 and live(pool) == []
restore(state, (), outputs)
assert deleters() == [True] * 3 and is_exactly(pool, outputs)
base = outputs[2].untyped_storage()
assert base.data_ptr() == kept[2]["data_ptr"]
# Their blocks are blocks as others are.
outputs[1].record_stream(torch.cuda.Stream())
while outputs:
    del base, outputs[0]
    base = None
    assert is_exactly(pool, outputs)
del graph, state
gpu.check_nothing_is_left(captured=True)
""")


def test_states_of_a_pool_are_restored_in_any_order_and_may_outlive_it(phantom):
    ran = through(phantom, code=CAPTURE + """
import random
random.seed(5)
anchor, mine = captured(lambda: [block(512)])
pool, stream = anchor.pool(), torch.cuda.Stream()
states, graphs = [], [anchor]
for turn in range(60):
    if turn % 3 == 0:
        some = [random.choice([300, 9000, 70 * KIB, 800 * KIB, 2 * MIB, 9 * MIB]) for _ in range(7)]
        graph, outputs = captured(lambda: [block(size) for size in some], pool, stream)
        graphs.append(graph)
        mine += outputs
        random.shuffle(mine)
        del mine[8:], outputs
        states.append((take(0, pool), live(pool)))
    else:
        state, wanted = random.choice(states)
        # Of blocks that no tensor owns torch wants to know before.
        for pointer in set(live(pool)) - set(pointers(mine)):
            torch._C._cuda_cudaCachingAllocator_raw_delete(pointer)
        restore(state, mine)
        mine.clear()
        assert live(pool) == wanted, turn
        # As torch's trees do with what has died since.
        for pointer in random.sample(wanted, len(wanted) // 2):
            torch._C._cuda_cudaCachingAllocator_raw_delete(pointer)
            wanted = [one for one in wanted if one != pointer]
        assert live(pool) == wanted
        torch.cuda.empty_cache()
    random.choice(graphs).replay()
for pointer in live(pool):
    torch._C._cuda_cudaCachingAllocator_raw_delete(pointer)
mine.clear()
state = states[0][0]
del graph, graphs, anchor, states
torch.cuda.synchronize()
torch.cuda.empty_cache()
said = refused(restore, state)
assert "keep one of them" in said and str(tuple(pool)) in said, said
del state
gpu.check_nothing_is_left(captured=True)
""")
    assert "ignored" not in ran.err


def test_what_other_streams_may_use_is_refused_and_nothing_is_changed(phantom):
    through(phantom, PHANTOM_KERNEL_NS=50_000_000, code=CAPTURE + """
graph, outputs = captured(lambda: [block(5 * MIB), block(600)])
pool, other = graph.pool(), torch.cuda.Stream()
state, where = take(0, pool), outputs[0].data_ptr()
with torch.cuda.stream(other):
    outputs[0].add_(1)
outputs[0].record_stream(other)
del outputs[0]
before = layout(pool)
said = refused(restore, state)
assert f"5.00 MiB at {where:#x}" in said and "record_stream" in said, said
assert "torch.cuda.synchronize()" in said and layout(pool) == before
torch.cuda.synchronize()
restore(state)
assert where in live(pool)
torch._C._cuda_cudaCachingAllocator_raw_delete(where)
del outputs, graph, state
gpu.check_nothing_is_left(captured=True)
""")


def test_states_say_which_pool_or_device_they_are_not_of(phantom):
    through(phantom, PHANTOM_DEVICES=2, code=CAPTURE + """
graph, outputs = captured(lambda: [block(512)])
state = take(0, graph.pool())
assert "of device 0, not of device 1" in refused(
    torch._C._cuda_setCheckpointPoolState, 1, state, [], []
)
assert "could not find pool (0, 77777)" in refused(take, 0, (0, 77777))
del outputs, graph, state
gpu.check_nothing_is_left(captured=True)
""")


def test_what_is_allocated_beside_the_graphs_of_a_pool_stays_where_it_is_as_they_do(phantom):
    """As the graph trees allocate the inputs that they copy: a captured kernel reads them where
    they were, long after they are freed."""
    through(phantom, code=CAPTURE + """
graph, outputs = captured(lambda: [block(512)])
pool, stream = graph.pool(), torch.cuda.Stream()
def beside(make):
    with torch.cuda.stream(stream):
        torch._C._cuda_beginAllocateCurrentThreadToPool(0, pool)
        try:
            return make()
        finally:
            torch._C._cuda_endAllocateToPool(0, pool)
            torch._C._cuda_releasePool(0, pool)
inputs = beside(lambda: [block(3 * MIB), block(9000)])
assert is_exactly(pool, outputs + inputs)
state, where = take(0, pool), pointers(inputs)
second, more = captured(lambda: [inputs[0] + 1], pool, stream)
del inputs
torch.cuda.synchronize()
torch.cuda.empty_cache()
mapped = segments(pool)
inside = lambda pointer: any(
    one["address"] <= pointer < one["address"] + one["total_size"] for one in mapped
)
assert all(map(inside, where)), "the memory that the graph reads is gone"
other = [block(3 * MIB) for _ in range(20)]
assert not set(pointers(other)) & set(where)
restore(state, more)
assert set(where) < set(live(pool))
for pointer in where:
    torch._C._cuda_cudaCachingAllocator_raw_delete(pointer)
del other, more, outputs, graph, second, state
gpu.check_nothing_is_left(captured=True)
""")


TREES = """
import torch._inductor.config as inductor
from torch._inductor import cudagraph_trees as trees
inductor.triton.slow_path_cudagraph_asserts = True
inductor.triton.fast_path_cudagraph_asserts = True


def manager():
    return trees.get_manager(0, create_if_none_exists=False)
"""


@pytest.mark.thorough
def test_a_compiled_training_loop_replays_graphs_and_captures_again(phantom):
    """torch.compile's graph trees without Triton, every assertion of theirs on: after each step the
    live blocks of the pool are exactly the live outputs. They do the same as over torch's own
    allocator, and the pool stops growing."""
    code = PRELUDE + CAPTURE + TREES + """
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256)
).cuda()
head = torch.nn.Linear(256, 256).cuda()
optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
compiled, on_top = (
    torch.compile(one, backend="cudagraphs", dynamic=False) for one in (model, head)
)
held = []
for turn in range(3):
    # Other shapes: other graphs, in the tree that there is.
    for rows in (64, 512, 64):
        for step in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            found = compiled(torch.randn(rows, 256, device="cuda"))
            if step % 2 or turn == 2:
                found = on_top(found)
            found.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    held.append(sum(one["total_size"] for one in segments(manager().cuda_graphs_thread_pool)))
assert held[0] > 0 and held[-1] == held[-2], held
done = [manager().new_graph_id().id, manager().debug_fail_counter]
done += [manager().debug_checkpointing_counter]
if gpu.by_door:
    gpu.check_books()
torch._dynamo.reset()
del found, compiled, on_top, model, head, optimizer
gc.collect()
torch.cuda.synchronize()
torch.cuda.empty_cache()
if gpu.by_door:
    gpu.check_nothing_is_left(captured=True)
print(json.dumps(done))
"""
    done = []
    for allocator in ("door", "native"):
        ran = phantom.run(None, code=code, allocator=allocator, **settings()).check()
        assert "are turned off" not in ran.err
        done.append(json.loads(ran.out.splitlines()[-1]))
    assert done[0] == done[1]
    graphs, _, checkpoints = done[0]
    assert graphs >= 6 and checkpoints >= 2


def test_a_tree_that_branches_is_set_back_to_where_it_branches(phantom):
    """A replayed, then B captured after it; A replayed, then C captured after it: before each
    capture the pool is made to be what A has left."""
    through(phantom, code=CAPTURE + TREES + """
def first(x):
    return x * 2 + 1, (x + 3).relu()
def left(x):
    return x.exp() - 1
def right(x):
    return torch.cat([x, x]) * 3
first, left, right = (
    torch.compile(one, backend="cudagraphs", dynamic=False) for one in (first, left, right)
)
x = torch.randn(700, 300, device="cuda")
with torch.no_grad():
    for turn in range(12):
        torch.compiler.cudagraph_mark_step_begin()
        one, two = first(x)
        if turn % 2:
            del two
        y = (left if turn % 4 < 2 else right)(one)
        assert y.shape == (700, 300) if turn % 4 < 2 else (1400, 300)
    found = manager()
    assert found.debug_checkpointing_counter >= 2, found.debug_checkpointing_counter
gpu.check_books()
""")


@pytest.mark.thorough
def test_compiled_graphs_that_run_out_of_memory_leave_the_device_usable(phantom):
    through(phantom, PHANTOM_MEMORY="600MiB", GRUYERE_CONF="headroom:0", code=CAPTURE + TREES + """
def work(x):
    return (x * 2).cumsum(0) + 1
def some(x, times):
    for _ in range(times):
        torch.compiler.cudagraph_mark_step_begin()
        y = compiled(x)
with torch.no_grad():
    small, large = (torch.randn(1 << size, device="cuda") for size in (20, 25))
    for _ in range(3):
        compiled = torch.compile(work, backend="cudagraphs", dynamic=False)
        some(small, 4)
        hog = [block(64 * MIB) for _ in range(5)]
        refused(some, large, 1, kind=torch.OutOfMemoryError)
        # The trees themselves are not made for that (a node without outputs).
        torch._dynamo.reset()
        del hog
    compiled = torch.compile(work, backend="cudagraphs", dynamic=False)
    some(large, 4)
gpu.check_books()
torch._dynamo.reset()
del compiled, small, large
gc.collect()
gpu.check_nothing_is_left(captured=True)
""")


def test_nothing_of_compile_is_turned_off(phantom):
    ran = through(phantom, code=TREES + """
wrapper = torch._TorchCompileInductorWrapper("reduce-overhead", None, None)
assert wrapper.config["triton.cudagraphs"]
trees.CUDAGraphTreeManager(0)
""")
    assert "CUDA graphs" not in ran.err
