"""torch.cuda.MemPool through the native door, as far as its segments go: over another allocator,
without splits, and tracked."""

import pytest

from door import through
from probe import OVER, probe  # noqa: F401

def test_a_pool_over_another_allocator_asks_it_for_torchs_segments_and_gives_each_back_once(
    phantom, probe
):
    through(phantom, PROBE=probe, PHANTOM_MEMORY="2GiB", code=OVER + """
outside = tensor(3)
pool = torch.cuda.MemPool(other)
assert segments(pool) == {} and counts() == (0, 0, 0)
with torch.cuda.use_mem_pool(pool):
    # Two blocks of 1 MiB share a segment of 2 MiB, as do two of 5 MiB one of 20; a block of 10 MiB
    # or more has its own, of whole 2 MiB.
    small = [tensor(1) for _ in range(2)]
    assert counts() == (1, 0, 0)
    medium = [tensor(5) for _ in range(2)]
    assert counts() == (2, 0, 0)
    large = of((12 << 20) + 1)
assert counts() == (3, 0, 0)
found = segments(pool)
assert sorted(found.values()) == [
    (2 * MIB, 2 * MIB),
    (14 * MIB, 12 * MIB + 512),
    (20 * MIB, 10 * MIB),
], found
kinds = {one["segment_type"]: one["total_size"] for one in torch.cuda.memory_snapshot(pool.id)}
assert kinds["small"] == 2 * MIB and kinds["large"] > 2 * MIB, kinds
assert {address: probe.probe_other_bytes(address) for address in found} == {
    address: size for address, (size, _) in found.items()
}
gpu.check_books()
assert torch.cuda.memory_allocated() == (3 + 2 + 10 + 12) * MIB + 512
# What is freed serves the pool, and stays where it is: whether it is there at the moment only the
# other allocator knows.
place = large.data_ptr()
del large, medium
torch.cuda.empty_cache()
assert counts() == (3, 0, 0) and segments(pool)[place] == (14 * MIB, 0)
elsewhere = tensor(12)
assert elsewhere.data_ptr() != place
with torch.cuda.use_mem_pool(pool):
    large = of((12 << 20) + 1)
assert large.data_ptr() == place and counts() == (3, 0, 0)
# The pool goes: what lies idle goes back, the rest when it is freed.
del small, pool
gc.collect()
assert counts() == (3, 2, 0)
large.zero_()
gpu.check_books()
del large
torch.cuda.empty_cache()
assert counts() == (3, 3, 0)
del outside, elsewhere
gpu.check_nothing_is_left()
""")


def test_out_of_memory_in_the_other_allocator_is_the_requests_and_its_errors_come_through(
    phantom, probe
):
    through(
        phantom, PROBE=probe, PHANTOM_MEMORY="1GiB", GRUYERE_CONF="headroom:0", code=OVER + """
pool, last = torch.cuda.MemPool(other), torch.cuda.MemPool(other)
def ooms():
    return torch.cuda.memory_stats()["num_ooms"]
with torch.cuda.use_mem_pool(pool):
    kept = tensor(100)
    text = refused(tensor, 2000, kind=torch.OutOfMemoryError)
    assert "Tried to allocate 1.95 GiB" in text and "for pool" in text, text
    assert ooms() == 1 and counts() == (1, 0, 0)
    # It gives none: an out-of-memory too.
    probe.probe_other_set(1, 0)
    refused(tensor, 200, kind=torch.OutOfMemoryError)
    assert ooms() == 2
    # What it throws is the request's error.
    probe.probe_other_set(2, 0)
    assert "the other allocator's own error" in refused(tensor, 200)
    assert ooms() == 2
    probe.probe_other_set(0, 0)
    more = tensor(200)
assert counts() == (2, 0, 0)
# Others' idle memory goes back before it is asked again.
idle = tensor(500)
del idle
with torch.cuda.use_mem_pool(pool):
    most = tensor(600)
assert ooms() == 2
# The ceiling is on it too.
torch.cuda.set_per_process_memory_fraction(0.9)
with torch.cuda.use_mem_pool(pool):
    refused(tensor, 60, kind=torch.OutOfMemoryError)
torch.cuda.set_per_process_memory_fraction(1.0)
gpu.check_books()
# A pool that is gone gives way to others' requests.
with torch.cuda.use_mem_pool(last):
    block = tensor(90)
del last
gc.collect()
del block
block = tensor(90)
del block, kept, more, most, pool
gpu.check_nothing_is_left()
assert counts()[0] == counts()[1] and counts()[2] == 0
""")


def test_only_an_out_of_memory_that_reached_the_program_counts(phantom, probe):
    through(
        phantom, PROBE=probe, PHANTOM_MEMORY="1GiB", GRUYERE_CONF="headroom:0", code=OVER + """
heard, kinds = [], []
torch._C._cuda_attach_out_of_memory_observer(lambda *what: heard.append(what))
gruyere.on_alert(lambda alert: kinds.append(alert.kind))
def ooms():
    return torch.cuda.memory_stats()["num_ooms"], len(heard)
pool = torch.cuda.MemPool(use_on_oom=True)
with torch.cuda.use_mem_pool(pool):
    idle = tensor(600)
del idle
rescued = tensor(600)
assert ooms() == (0, 0), ooms()
del rescued
pool = None
gc.collect()
code = ctypes.c_int(-1)
assert probe.probe_callbacks(700 * MIB, 600 * MIB, ctypes.byref(code)) == 1 and code.value == 0
assert ooms() == (0, 0), ooms()
refused(tensor, 2000, kind=torch.OutOfMemoryError)
assert ooms() == (1, 1), ooms()
import time
end = time.time() + 20
while "out_of_memory" not in kinds and time.time() < end:
    time.sleep(0.01)
assert kinds.count("out_of_memory") == 1, kinds
gpu.check_nothing_is_left()
""")


def test_blocks_of_a_pool_without_splits_have_segments_of_their_own(phantom):
    through(phantom, code="""
def segments(pool):
    found = pool.snapshot()
    found = found["segments"] if isinstance(found, dict) else found
    return sorted((one["total_size"], len(one["blocks"])) for one in found)
pool = torch.cuda.MemPool(no_split=True)
with torch.cuda.use_mem_pool(pool):
    blocks = [tensor(1), tensor(1), tensor(5), tensor(5)]
assert segments(pool) == [(2 * MIB, 1)] * 2 + [(20 * MIB, 1)] * 2, segments(pool)
gpu.check_books()
places = {block.data_ptr() for block in blocks}
del blocks
with torch.cuda.use_mem_pool(pool):
    again = [tensor(3), tensor(7), torch.empty(1000, dtype=torch.uint8, device="cuda")]
assert {block.data_ptr() for block in again} <= places and len(segments(pool)) == 4
gpu.check_books()
del again, pool
gpu.check_nothing_is_left()
""")


def test_trackers_hear_of_segments_when_they_are_there_and_before_they_go(phantom, probe):
    through(phantom, PROBE=probe, code=OVER + """
assert probe.probe_tracker() == 0
ordinary = [tensor(size) for size in (1, 30, 3)]
assert events() == []
pool, plain = torch.cuda.MemPool(other), torch.cuda.MemPool()
with torch.cuda.use_mem_pool(pool):
    a, b, c = tensor(1), tensor(12), tensor(14)
with torch.cuda.use_mem_pool(plain):
    d = tensor(16)
id, plain_id = pool.id[1], plain.id[1]
came = [
    (0, a.data_ptr(), 2 * MIB, id, 1),
    (0, b.data_ptr(), 12 * MIB, id, 1),
    (0, c.data_ptr(), 14 * MIB, id, 1),
    (0, d.data_ptr(), 16 * MIB, plain_id, 0),
]
assert events() == came, events()
# In the order in which they came: ranks register them in that order.
order = [probe.probe_registered(id, block.data_ptr()) for block in (a, b, c)]
assert order == sorted(set(order)) and order[0] >= 0, order
assert probe.probe_registered(plain_id, d.data_ptr()) > order[-1]
places = {block.data_ptr() for block in (a, b, c)}
del a, b, c, pool
gc.collect()
# Each is still there when it is told of, and told once.
went = events()[4:]
assert {(event[0], event[1], event[4]) for event in went} == {(1, at, 1) for at in places}
assert len(went) == 3 and counts() == (3, 3, 0)
del ordinary, plain, d
gpu.check_nothing_is_left()
assert events()[7:] == [(1, came[3][1], 16 * MIB, plain_id, 0)], events()[7:]
""")
