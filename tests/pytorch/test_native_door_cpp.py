"""The native door from torch's C++ side: what Python cannot ask of an allocator."""

from door import through
from probe import USE, probe  # noqa: F401


def test_a_pointer_its_context_its_deleter_and_both_registrations_are_as_torch_expects(
    phantom, probe
):
    ran = through(
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
    (probe.probe_checkpoint, "no graph was captured into it"),
    (probe.probe_restore, "getCheckpointState"),
    (probe.probe_ipc, "unknown kind"),
):
    assert refuse() == 2 and remedy in said(), said()
# Initialised twice, and in a child that has no CUDA: nothing happens.
assert probe.probe_init() == 0
child = os.fork()
if child == 0:
    os._exit(probe.probe_init())
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
gpu.check_books()
gpu.check_nothing_is_left()
""")
    assert ran.books["forked_calls"] == 0
