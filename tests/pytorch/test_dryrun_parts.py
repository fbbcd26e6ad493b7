"""Pieces of a dry run, each by itself, without a device."""

import sys
from types import SimpleNamespace

import pytest

from conftest import ROOT  # noqa: F401 (the package's folder is on the path)
from gruyere._bench.measure import COMPLETED, FAILED, OUT_OF_MEMORY
from gruyere._bench.script import Enough
from gruyere._dryrun import live, text, trust
from gruyere._dryrun.hooks import Seen
from gruyere._dryrun.identity import ByIdentity, named_modules, named_tensors
from gruyere._dryrun.main import DryRun
from gruyere._dryrun.runs import Plan, Ran
from gruyere._dryrun.settings import Settings
from gruyere._dryrun.sweep import Sweep
from gruyere._dryrun.worker import UNUSABLE, Found, Worker
from gruyere._sandbox.reach import Reach

GIB, MIB = 1 << 30, 1 << 20


def test_what_is_known_of_an_object_is_its_own_and_goes_with_it():
    class Same:
        __hash__ = None

        def __eq__(self, other):
            raise AssertionError("nobody may ask")

    one, other = Same(), Same()
    known = ByIdentity()
    known[one] = 1
    assert one in known and other not in known
    assert (known.get(one), known.get(other)) == (1, None)
    known[one] = 2
    assert known.get(one) == 2
    del one
    assert known.known == {}


def test_a_module_in_two_places_is_named_by_the_first_as_torch_does():
    def module(**parts):
        return SimpleNamespace(_modules=parts, _parameters={"w": object(), "none": None})

    shared = module()
    root = module(a=module(x=shared, none=None), b=shared, c=module())
    assert [path for path, _ in named_modules(root)] == ["", "a", "a.x", "c"]
    assert [path for path, _ in named_tensors(root)] == ["w", "a.w", "a.x.w", "c.w"]


# Pure logic.


@pytest.mark.parametrize(
    "program, wanted",
    [
        (["--batch", "2", "--lr", "1"], ["--batch", "8", "--lr", "1"]),
        (["--batch=2"], ["--batch=8"]),
        (["--lr", "1"], ["--lr", "1", "--batch", "8"]),
    ],
)
def test_a_value_goes_behind_its_flag(program, wanted):
    assert Sweep("batch=--batch:1..64", tuple(program)).arguments("8") == tuple(wanted)


def sequence(*requests):
    """Requests as (bytes, thread)."""
    threads = sorted({thread for _, thread in requests})
    return {
        "sizes": [size for size, _ in requests],
        "groups": [threads.index(thread) for _, thread in requests],
        "at": list(range(len(requests))),
        "inside": list(range(len(requests))),
        "read": [-1] * len(requests),
        "lines": [f"train.py:{number}" for number in range(len(requests))],
        "threads": threads,
    }


def test_requests_are_compared_in_the_order_of_each_thread():
    first = sequence((1, "a"), (2, "b"), (3, "a"))
    assert trust.difference(first, sequence((2, "b"), (1, "a"), (3, "a"))) is None
    parted = trust.difference(first, sequence((1, "a"), (2, "b"), (4, "a")))
    assert (parted["request"], parted["zeros"]["bytes"], parted["random"]["bytes"]) == (3, 3, 4)
    assert trust.difference(first, sequence((1, "a"), (2, "b")))["random"] is None
    more = trust.difference(first, sequence((1, "a"), (2, "b"), (3, "a"), (9, "c")))
    assert more["zeros"] is None and more["random"]["bytes"] == 9


def test_layers_that_repeat_are_one_row():
    assert live.collapsed("model.layers.31.mlp") == "model.layers.*.mlp"
    assert live.collapsed("m.0.1") == "m.*.*"
    assert live.collapsed("conv1.2d") == "conv1.2d"


@pytest.mark.parametrize(
    "allocator, said, wanted, left_out",
    [
        ("default", "expandable_segments:True", "", True),
        ("default", "max_split_size_mb:64, backend:cudaMallocAsync", "max_split_size_mb:64", True),
        ("default", "roundup_power2_divisions:[256:1,>:2]", "roundup_power2_divisions:[256:1,>:2]",
         False),
        ("expandable", "expandable_segments:True", "expandable_segments:True", False),
        ("expandable", "max_split_size_mb:64", "expandable_segments:True,max_split_size_mb:64",
         False),
    ],
)  # fmt: skip
def test_a_row_keeps_its_allocator_and_the_rest_of_the_programs_settings(
    allocator, said, wanted, left_out
):
    settings = Settings(allocator)
    assert settings.kept(said) == wanted
    assert bool(settings.left_out) == left_out


class Torch:
    cuda = SimpleNamespace(OutOfMemoryError=type("OutOfMemoryError", (RuntimeError,), {}))


@pytest.mark.parametrize(
    "first, then, outcome",
    [
        (Torch.cuda.OutOfMemoryError("CUDA out of memory."), SystemExit(1), OUT_OF_MEMORY),
        (ValueError("of its own"), SystemExit(1), FAILED),
        # What fails because the run was stopped after its steps is no failure of the program's.
        (Enough(0), NameError("summary"), COMPLETED),
        (Enough(0), Torch.cuda.OutOfMemoryError("CUDA out of memory."), OUT_OF_MEMORY),
    ],
)
def test_how_a_program_ended_is_told_by_what_ended_it(first, then, outcome):
    then.__context__ = first
    worker = object.__new__(Worker)
    worker.torch, worker.found = Torch, Found(COMPLETED)
    worker.reach, worker.refused = Reach(["files", "network"]), []
    worker.stopped_by(then)
    assert worker.found.outcome == outcome


def test_an_environment_without_torch_is_told_of_and_is_no_fault_of_the_programs():
    def stopped_by(missing):
        worker = object.__new__(Worker)
        worker.torch, worker.found = None, Found(COMPLETED)
        worker.reach, worker.refused = Reach(["files", "network"]), []
        worker.stopped_by(ModuleNotFoundError(f"No module named {missing!r}", name=missing))
        return worker.found

    found = stopped_by("torch")
    assert found.outcome == UNUSABLE
    assert sys.executable in found.reason and "--python" in found.reason
    assert stopped_by("flash_attn").outcome == FAILED


def test_a_try_that_fails_where_memory_is_short_is_one_that_does_not_complete():
    class Runner:
        def run(self, plan, progress):
            enough = plan.memory >= 300 * MIB
            return Ran(plan, Found(COMPLETED if enough else FAILED, "short, in its own words"))

    gpu = {"id": "any", "memory": 1 * GIB, "context": 0}
    asked = {"gpus": [gpu], "allocators": ["default"], "assumed_context": 0}
    done = Ran(Plan("default", gpu, 1 * GIB, ()), Found(COMPLETED, allocated_peak=200 * MIB))
    done.found.physical_peak = 400 * MIB
    found = DryRun(asked, Runner()).smallest([done])
    assert found == {("any", "default"): 300 * MIB}


def test_a_program_that_asked_for_no_memory_has_an_answer():
    report = {"peak": {"bytes": 0, "kinds": {}, "modules": [], "lines": []}}
    assert "no memory" in text._kinds(report, 80)
    assert text._modules(report, 80) == text._lines(report, 80) == ""


@pytest.mark.parametrize(
    "values, largest", [(["8", "16", "2"], "8"), (["small", "large", "huge"], "large")]
)
def test_the_largest_of_a_list_is_by_number_or_by_place(values, largest):
    sweep = Sweep(f"n={','.join(values)}", ("{n}",))
    sweep.rows = [
        {"value": value, "gpu": "g", "allocator": "torch", "fits": value not in ("16", "huge")}
        for value in values
    ]
    assert sweep.largest("g", "torch") == largest
    assert sweep.chosen("g") == largest


def entry(action, address, size, mark, phase=0):
    return {"action": action, "addr": address, "size": size, "frames": [],
            "user_metadata": f"{mark} {phase} 0 0"}  # fmt: skip


class Nowhere:
    def of_frames(self, frames):
        return "(libraries)"

    def inside(self, frames):
        return ""


def test_a_sighting_is_of_the_block_that_was_there_then():
    seen = Seen(sightings=[(2, 64, "gradients", "w")], backwards=[1], steps=[5])
    trace = [
        entry("alloc", 64, 100, 0), entry("free_requested", 64, 100, 1),
        entry("alloc", 64, 100, 1, 1), entry("free_requested", 64, 100, 2),
        # The same address once more, after the sighting.
        entry("alloc", 64, 100, 2),
    ]  # fmt: skip
    blocks = live.History(trace, seen, Nowhere()).blocks
    assert [block.kind for block in blocks] == ["activations", "gradients", "other"]
    assert {block.bytes for block in blocks} == {512}


def test_what_an_older_torch_does_not_tell_is_not_made_up():
    trace = [{**entry("alloc", 64, 100, 0), "user_metadata": ""}]
    found = live.analyse(trace, Seen(), Nowhere())
    peak = found["peak"]
    assert (found["workspaces"], peak["phase"], peak["step"]) == (None, "", 0)
    assert peak["kinds"]["other"] == peak["bytes"] == 512


def test_a_moment_between_two_of_the_timeline_is_not_lost():
    trace = []
    for number in range(2000):
        trace += [
            entry("alloc", 512 * number, 512, 0),
            entry("free_requested", 512 * number, 512, 0),
        ]
    # Two of 1 MiB at once, for one event.
    trace[1001:1001] = [
        entry("alloc", 1 << 30, MIB, 0), entry("alloc", 1 << 31, MIB, 0),
        entry("free_requested", 1 << 31, MIB, 0), entry("free_requested", 1 << 30, MIB, 0),
    ]  # fmt: skip
    found = live.analyse(trace, Seen(), Nowhere())
    sums = [sum(moment) for moment in zip(*found["timeline"]["kinds"].values())]
    assert len(sums) <= 600
    assert max(sums) == found["peak"]["bytes"] == 2 * MIB + 512
