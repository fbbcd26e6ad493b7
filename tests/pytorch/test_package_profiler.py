"""The Python package: through the pluggable door torch's profiler hears of memory as from torch's
own allocator, while memory is profiled and at no other time."""

from conftest import GRUYERE, HERE, ROOT

PRELUDE = """
import ctypes, json, os
import torch
from torch.profiler import ProfilerActivity, profile
if os.environ.get("GRUYERE_LIBRARY"):
    import gruyere
    gruyere.enable(door="pluggable")
torch.backends.cudnn.enabled = False

def tensor(kib):
    return torch.empty(kib << 10, dtype=torch.uint8, device="cuda")

def watch(**settings):
    return profile(activities=[ProfilerActivity.CPU], **settings)

def told(watched):
    # What the profiler was told of CUDA's memory, in order: the bytes that came or went.
    return [
        event.nbytes()
        for event in sorted(
            watched.profiler.kineto_results.events(), key=lambda event: event.start_ns()
        )
        if event.name() == "[memory]" and "CUDA" in str(event.device_type())
    ]

def lived(watched):
    # What was live with each block that came, and each out-of-memory.
    found, events = [], list(watched.profiler.kineto_results.experimental_event_tree())
    while events:
        event = events.pop()
        events += event.children
        fields = event.extra_fields
        kind = type(fields).__name__
        if "OutOfMemory" in kind:
            found.append((event.start_time_ns, "out of memory"))
        elif "Allocation" in kind and fields.device.type == "cuda":
            found.append((event.start_time_ns, fields.total_allocated))
    return [what for _, what in sorted(found)]
"""


def both(phantom, code, **others):
    """What a program reports under Gruyère and under torch's own allocator, whose large blocks are
    cut at 512 B as Gruyère's are."""
    reports = []
    for package in (True, False):
        settings = {"GRUYERE_LIBRARY": GRUYERE} if package else {}
        ran = phantom.run(
            "",
            code=PRELUDE + code,
            allocator="native" if package else "expandable",
            PYTHONPATH=f"{HERE / 'programs'}:{ROOT / 'python_loader'}",
            **settings,
            **others,
        )
        # Not Ran.check(): the phantom has no CUPTI, and says so.
        assert ran.code == 0 and ran.books["misuse"] == [], ran.err
        reports.append(ran.report)
    return reports


def test_a_profiler_of_memory_hears_what_torchs_own_allocator_tells_it(phantom):
    code = """
before = [tensor(3), tensor(9 << 10)]
with watch(profile_memory=True) as watched:
    kept = [tensor(size) for size in (1, 700, 2 << 10, 33 << 10)]
    # Blocks that are older than the profile, and younger.
    del before
    kept.pop()
    weight = torch.ones(1000, device="cuda", requires_grad=True)
    # On a thread of autograd's.
    (weight * 2).sum().backward()
after = tensor(5)
print(json.dumps({"told": told(watched), "lived": lived(watched)}))
"""
    ours, theirs = both(phantom, code)
    assert ours == theirs
    assert min(ours["told"]) == -(33 << 20) and {3 << 10, -(3 << 10)} & set(ours["told"])
    assert len(ours["lived"]) >= 6 and max(ours["lived"]) > 33 << 20


def test_a_profiler_of_memory_hears_of_an_out_of_memory(phantom):
    code = """
kept = tensor(100 << 10)
with watch(profile_memory=True) as watched:
    try:
        tensor(2 << 20)
    except torch.OutOfMemoryError:
        pass
    try:
        torch.empty(1 << 60, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        pass
print(json.dumps({"lived": lived(watched)}))
"""
    ours, theirs = both(phantom, code, PHANTOM_MEMORY="1GiB")
    # One for the two: what no program means is no attempt.
    assert ours == theirs == {"lived": ["out of memory"]}


def test_requests_are_told_of_while_a_profiler_of_memory_runs_and_at_no_other_time(phantom):
    code = """
from gruyere._native.library import load
library, calls = load(), []
original = library.gruyere_tell_profiler
library.gruyere_tell_profiler = lambda wanted: calls.append(wanted.value) or original(wanted)
# Before CUDA is in use: it stays for the heap that comes.
early = watch(profile_memory=True)
early.start()
assert not torch.cuda.is_initialized()
first = tensor(1)
early.stop()
counts = [len(told(early))]
with watch():
    other = tensor(1)
assert calls == [1, 0], calls
with watch(profile_memory=True) as watched:
    second = tensor(1)
counts.append(len(told(watched)))
# One that does not come to start leaves nothing on.
class Refused(torch.autograd.profiler.profile):
    def config(self, **_):
        raise RuntimeError("no")
try:
    Refused(profile_memory=True)._start_trace()
except RuntimeError:
    third = tensor(1)
print(json.dumps({"counts": counts, "calls": calls}))
"""
    ran = phantom.run(
        "",
        code=PRELUDE + code,
        PYTHONPATH=f"{HERE / 'programs'}:{ROOT / 'python_loader'}",
        GRUYERE_LIBRARY=GRUYERE,
    )
    assert ran.code == 0 and ran.books["misuse"] == [], ran.err
    assert ran.report["counts"] == [1, 1]
    assert ran.report["calls"] == [1, 0] * 3
