"""Pieces of a dry run, each by itself, without a device."""

import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from conftest import ROOT  # noqa: F401 (the package's folder is on the path)
from gruyere._bench.measure import COMPLETED, FAILED, OUT_OF_MEMORY
from gruyere._bench.script import Enough
from gruyere._dryrun import gpus, live, report, sentences, text, trust
from gruyere._dryrun.hooks import Seen
from gruyere._dryrun.identity import ByIdentity, named_modules, named_tensors
from gruyere._dryrun.lines import Lines
from gruyere._dryrun.main import DryRun
from gruyere._dryrun.optimizers import Optimizers, short
from gruyere._dryrun.rest import Rest
from gruyere._dryrun.runs import Plan, Ran
from gruyere._dryrun.settings import Settings
from gruyere._dryrun.sizing import _HANDLES, Sizing, limit, sizes_itself
from gruyere._dryrun.sweep import Sweep
from gruyere._dryrun.trials import trials
from gruyere._dryrun.trust import parted
from gruyere._dryrun.worker import UNUSABLE, Found, Worker
from gruyere._errors import GruyereError
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
    worker.reach, worker.refused, worker.rest = Reach(["files", "network"]), [], Rest(False)
    worker.hooks = None
    worker.stopped_by(then)
    assert worker.found.outcome == outcome


@pytest.mark.parametrize(
    "refusals, in_vain, counted",
    [
        ([0, 0, 0], 0, 3),
        # The step in which it was refused counts: the program made it with less.
        ([0, 1, 1, 1], 1, 3),
        ([2, 2, 3, 3, 3], 2, 3),
        # After four times as many steps as asked, those of a program that is refused in each count.
        (list(range(1, 15)), 11, 3),
    ],
)
def test_steps_are_counted_from_the_last_refusal_on(refusals, in_vain, counted):
    worker = object.__new__(Worker)
    worker.torch, worker.found = None, Found(COMPLETED)
    worker.steps, worker.last_step, worker.refusals, worker.in_vain = 3, None, 0, 0
    for number in refusals:
        assert worker.found.steps < 3, "the run is over"
        worker.meter = SimpleNamespace(refused=lambda _, number=number: number)
        worker._note_refusals()
        worker.found.steps += 1
    assert (worker.in_vain, worker.found.steps) == (in_vain, counted)


def test_an_environment_without_torch_is_told_of_and_is_no_fault_of_the_programs():
    def stopped_by(missing):
        worker = object.__new__(Worker)
        worker.torch, worker.found = None, Found(COMPLETED)
        worker.reach, worker.refused, worker.rest = Reach(["files", "network"]), [], Rest(False)
        worker.hooks = None
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


def test_a_block_counts_as_requested_until_its_streams_are_done_with_it_as_in_torchs_statistics():
    trace = [
        entry("alloc", 64, 100, 0),
        # Another stream uses it: record_stream.
        entry("free_requested", 64, 100, 1), entry("alloc", 1024, 300, 1),
        entry("free_completed", 64, 100, 2), entry("alloc", 2048, 50, 2),
    ]  # fmt: skip
    found = live.analyse(trace, Seen(), Nowhere())
    assert found["requested_peak"] == 100 + 300
    # Live bytes end with the program's own free.
    assert found["peak"]["bytes"] == 2 * 512


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


# What a run must have done for its answer to count.


@pytest.mark.parametrize(
    "made, steps, caught, said",
    [
        # Of three steps. It stopped by a value before its optimiser stepped.
        (1, 0, 0, "it made 0 of the 3 steps asked: it ended before its optimiser had stepped"),
        # Each batch ran out of memory and was left out.
        (1, 0, 8, "it made 0 of the 3 steps asked: it ran out of memory 8 times"),
        (1, 2, 1, "it made 2 of the 3 steps asked: it ran out of memory 1 time,"),
        # A short training; one that went on with a smaller batch; one without an optimiser.
        (1, 2, 0, ""),
        (1, 3, 1, ""),
        (0, 0, 0, ""),
        (0, 0, 4, ""),
    ],
)
def test_a_program_that_ended_before_its_steps_does_not_fit(made, steps, caught, said):
    found = short(made, steps, 3, caught)
    assert found.startswith(said) and bool(found) == bool(said)
    ran = Ran(None, Found(COMPLETED, facts={"short": found}))
    assert ran.fits == (not said)


def test_a_value_of_a_sweep_at_which_nothing_was_trained_does_not_count():
    def run(value):
        said = "" if int(value) <= 37 else "it made 0 of the 3 steps asked"
        return Ran(None, Found(COMPLETED, facts={"short": said}))

    sweep = Sweep("batch=--batch:1..64", ())
    sweep.search({"id": "any"}, "default", run)
    assert sweep.largest("any", "torch") == "37"
    report = {"sweep": sweep.table(), "program": {"command": "train.py --batch 37"}}
    said = text._sweep(report, 100)
    assert "64  no steps" in said and "No steps: with 38, it made 0 of the 3 steps asked." in said


class Stepper:
    """An optimiser of one parameter, or of those of another one."""

    def __init__(self, of=None):
        value = SimpleNamespace(is_cuda=True, requires_grad=True, numel=lambda: 1)
        self.param_groups = of.param_groups if of else [{"params": [value]}]


def test_a_run_goes_on_until_each_optimiser_has_stepped():
    known, critic, generator = Optimizers(), Stepper(), Stepper()
    known.made(critic, "gan.py:5")
    known.made(generator, "gan.py:6")
    steps = 0
    while True:
        known.stepped(critic)
        known.step_is_over()
        steps += 1
        if steps >= 3 and not known.goes_on(steps, 3):
            break
        if steps % 5 == 0:
            known.stepped(generator)
    # The generator's states are there from its second step on.
    assert steps == 11 and known.never() == []


def test_an_optimiser_that_never_stepped_is_told_and_does_not_keep_a_run_for_ever():
    known, one, other = Optimizers(), Stepper(), Stepper()
    known.made(one, "train.py:5")
    known.made(other, "train.py:6")
    known.stepped(one)
    known.step_is_over()
    assert known.goes_on(29, 3) and not known.goes_on(30, 3)
    # It is gone at the end of the program.
    del other
    assert known.never() == ["Stepper made at train.py:6"]


def test_an_optimiser_is_not_waited_for_if_another_steps_its_parameters_or_it_is_gone():
    known, inner, dropped = Optimizers(), Stepper(), Stepper()
    wrapper = Stepper(inner)
    for number, optimizer in enumerate((inner, wrapper, dropped)):
        known.made(optimizer, f"train.py:{number}")
    frozen = Stepper()
    frozen.param_groups[0]["params"][0].requires_grad = False
    known.made(frozen, "train.py:9")
    del dropped, optimizer
    for _ in range(3):
        known.stepped(inner)
        known.step_is_over()
    assert not known.goes_on(3, 3) and known.never() == []


def test_a_retry_with_room_counts_only_if_it_begins_as_the_run_that_had_none():
    def ran(*sizes):
        made = sequence(*((size, "a") for size in sizes))
        return Found(COMPLETED, analysis={"sequence": made})

    assert trust.begins(ran(1, 2), ran(1, 2, 3))
    assert not trust.begins(ran(1, 2), ran(1, 4, 3))
    assert trust.begins(ran(1, 2), Found(FAILED))


def test_a_program_that_sizes_itself_is_not_judged_on_gpus_where_it_did_not_run():
    row = {"allocator": "torch", "failed": False, "peak_held": 1, "peak_live": 1}
    other = {**gpus.find("t4-16")}
    assert report._other(other, {"runs": [row]}, False)["runs"][0]["by_the_books"] == "fits"
    assert report._other(other, {"runs": [row]}, True)["runs"][0]["by_the_books"] == "unknown"
    told = {"asked": "train.py:4", "fraction": None, "limited": None}
    sizing = sizes_itself(told, 0)
    assert sizes_itself({"asked": None, "fraction": None}, 0) is None
    assert sizes_itself({"asked": None, "fraction": None}, 1)["caught"] == 1
    assert sizes_itself({"handles": "train.py:8"}, 0)["handles"] == "train.py:8"
    said = " ".join(text._others({"others": [other], "sizing": sizing}, 100).split())
    assert said.endswith(
        "(it asks for the device's memory at train.py:4), so these figures tell nothing of "
        "another; only a run does (--gpu NAME)."
    )


def test_the_programs_own_fraction_is_what_it_runs_into():
    assert limit({"fraction": 0.5}, 16 * GIB, 15 * GIB) == 8 * GIB
    assert limit({"fraction": 0.99}, 16 * GIB, 15 * GIB) is None
    assert limit({"fraction": None}, 16 * GIB, 15 * GIB) is limit(None, 1, 1) is None
    run = {"allocator": "torch", "fits": False, "failed": False, "margin": -GIB, "caught": 0,
           "limit": 8 * GIB, "short": ""}  # fmt: skip
    said = sentences.verdict({
        "trust": {"reasons": []}, "growth": None,
        "verdict": {"max_bytes": None, "needs": None, "fits": False},
        "gpus": [{"id": "t4-16", "runs": [run], "kernels": True}],
        "program": {"steps": 3, "steps_asked": 3},
        "sizing": {"asked": None, "fraction": 0.5, "limited": "train.py:2", "caught": 0},
    })  # fmt: skip
    assert said == (
        "It does not fit on t4-16: it runs into its own limit, the fraction 0.5 of the memory set "
        "at train.py:2 (8.00 GiB), at least 1.00 GiB too little."
    )


def test_an_answer_that_cannot_be_trusted_does_not_say_that_it_fits():
    run = {"allocator": "torch", "fits": True, "failed": False, "margin": GIB, "caught": 0}
    said = sentences.verdict({
        "trust": {"reasons": ["a reason"]}, "growth": None,
        "verdict": {"max_bytes": None, "needs": None},
        "gpus": [{"id": "t4-16", "runs": [run], "kernels": True}],
        "program": {"steps": 3, "steps_asked": 3},
    })  # fmt: skip
    assert said == (
        "Not trustworthy: a reason. These runs had 1.00 GiB to spare with torch on t4-16."
    )


def test_a_context_that_the_gpu_has_no_room_for_is_refused():
    with pytest.raises(GruyereError, match="--context 20.00 GiB: t4-16 has 14.56 GiB"):
        gpus.chosen(["t4-16"], [], 20 * GIB)


def completed(allocator, requested, analysis=None, **more):
    gpu = GPU
    plan = Plan(allocator, gpu, 8 * GIB, ())
    return Ran(plan, Found(COMPLETED, requested_peak=requested, analysis=analysis, **more))


GPU = {"id": "any", "memory": 8 * GIB, "context": 0}


def figures(live, total):
    return {"allocated_peak": live * MIB, "requested_total": total * MIB}


def test_a_program_that_took_another_path_under_another_allocator_is_not_trusted():
    first = completed("default", 500 * MIB, **figures(500, 9000))
    near = completed("gruyere", 501 * MIB, **figures(501, 9001))
    far = completed("gruyere", 900 * MIB, **figures(900, 9400))
    uncounted = completed("async", 0)
    assert report._trust(first, first, [near, uncounted], False)["reasons"] == []
    (reason,) = report._trust(first, first, [near, far], False)["reasons"]
    assert reason.startswith("the program requested other amounts with gruyere")


@pytest.mark.parametrize(
    "live, total, is_trusted",
    [(500, 9000, True), (470, 9000, True), (400, 9000, False), (500, 8000, False)],
)
def test_blocks_that_other_streams_still_use_are_no_other_path(live, total, is_trusted):
    """They count as requested until the allocator sees that the streams are done with them."""
    # torch's default had 500 MiB live with what it did not split off, and 470 MiB without.
    blocks = {"requested_peak": 620 * MIB, "peak": {"bytes": 470 * MIB, "out_of_memory": False}}
    first = completed("default", 620 * MIB, blocks, **figures(500, 9000))
    ours = completed("gruyere", 500 * MIB, **figures(live, total))
    assert (report._rows_differ(first, [ours]) == []) == is_trusted


@pytest.mark.parametrize("caught, filled", [(0, False), (5, True)])
def test_a_gpu_that_a_search_for_the_largest_batch_filled_is_not_called_tight(caught, filled):
    gpu = gpus.chosen(["t4-16"], [], None)[0]
    has = report.usable(gpu)
    found = Found(COMPLETED, physical_peak=has - MIB, allocated_peak=has // 2, retries=9,
                  caught=caught)  # fmt: skip
    row = report._row(Ran(Plan("gruyere", gpu, has, ()), found), None, None, gpu)
    assert (row["tight"], row["filled"]) == (not filled, filled)
    said = sentences.verdict({
        "trust": {"reasons": []}, "growth": {"bytes_a_step": MIB, "line": "train.py:9"},
        "verdict": {"max_bytes": None, "needs": None, "fits": True}, "rest": None,
        "gpus": [{"id": "t4-16", "runs": [row], "kernels": True, "usable": has}],
        "program": {"steps": 3, "steps_asked": 3}, "sizing": {"handles": None, "caught": caught},
        "peak": {"bytes": GIB, "refused": caught, "out_of_memory": False},
        "analysed": {"gpu": "t4-16", "with_room": False},
    })  # fmt: skip
    assert ("what is to spare is not known. After that it had 1.00 GiB of" in said) == filled
    assert ("1 MiB to spare" in said) == ("is full after 1 more step" in said) == (not filled)


def test_the_live_peak_is_of_what_came_after_the_last_refusal():
    peak = {"bytes": 300 * MIB, "refused": 2, "out_of_memory": False}
    ran = completed("default", 900 * MIB, {"peak": peak}, **figures(900, 9000))
    assert ran.live_peak == 300 * MIB
    peak["refused"] = 0
    assert ran.live_peak == 900 * MIB


def test_requests_that_differ_with_the_same_values_are_laid_to_the_hosts_random_numbers():
    def analysed(size):
        made = {"sequence": sequence((size, "a")), "requested_peak": 500 * MIB,
                "peak": {"bytes": size}}  # fmt: skip
        return completed("default", 500 * MIB, made)

    for by_host, said in ((True, "with the same values"), (False, "with zeros and with random")):
        trusted = report._trust(analysed(1), analysed(2), [], by_host)
        assert len(trusted["reasons"]) == 1 and said in trusted["reasons"][0]
        assert ("torch.manual_seed" in trusted["reasons"][0]) == by_host


@pytest.mark.parametrize(
    "line, is_told",
    [
        ("except torch.cuda.OutOfMemoryError:", True),
        ('if "out of memory" in str(error):', True),
        ("# OutOfMemoryError", False),
        ("model.train()", False),
    ],
)
def test_a_program_that_names_out_of_memory_errors_may_handle_them_elsewhere(
    tmp_path, monkeypatch, line, is_told
):
    (tmp_path / "train.py").write_text(f"import torch\n{line}\n")
    module = SimpleNamespace(__file__=str(tmp_path / "train.py"))
    monkeypatch.setattr(sys, "modules", {"train": module})
    sizing = Sizing()
    sizing.lines = Lines(str(tmp_path))
    assert sizing._first(_HANDLES) == ("train.py:2" if is_told else None)


POOL, MAIN = "/usr/lib/python3/threading.py:_bootstrap", "train.py:<module>"


def requests(*pairs):
    """An analysis of requests of (bytes, thread), at a peak of 1 GiB."""
    threads = sorted({thread for _, thread in pairs})
    count = len(pairs)
    return {
        "peak": {"bytes": GIB},
        "sequence": {
            "sizes": [size for size, _ in pairs], "threads": threads,
            "groups": [threads.index(thread) for _, thread in pairs],
            "at": [0] * count, "inside": [0] * count, "read": [-1] * count, "lines": ["train.py:1"],
        },
    }  # fmt: skip


def test_threads_of_a_pool_may_request_in_any_order():
    first = requests((1 * MIB, POOL), (2 * MIB, POOL), (3 * MIB, MAIN))
    assert parted(first, requests((2 * MIB, POOL), (3 * MIB, MAIN), (1 * MIB, POOL))) is None
    other = parted(first, requests((1 * MIB, POOL), (4 * MIB, POOL), (3 * MIB, MAIN)))
    assert other["zeros"]["bytes"] == 2 * MIB and other["random"]["bytes"] == 4 * MIB
    twice = requests((1 * MIB, MAIN), (2 * MIB, MAIN))
    assert parted(twice, requests((2 * MIB, MAIN), (1 * MIB, MAIN))), "a thread has its order"


def test_a_number_more_or_less_is_no_other_path_where_the_peaks_are_equal():
    first = requests((3 * MIB, MAIN), (512, MAIN), (5 * MIB, MAIN))
    second = requests((3 * MIB, MAIN), (5 * MIB, MAIN))
    assert parted(first, second) is None
    # At another peak it is one.
    second["peak"]["bytes"] = GIB + 2 * MIB
    assert parted(first, second)["zeros"]["bytes"] == 512
    # And so is a request that counts.
    assert parted(first, requests((3 * MIB, MAIN), (512, MAIN)))["zeros"]["bytes"] == 5 * MIB


@pytest.mark.parametrize(
    "line, trainers, told",
    [
        ("auto_find_batch_size=True,", [], "train.py:2"),
        ("auto_find_batch_size = False", [], None),
        ("auto_find_batch_size=args.auto", [], None),
        ("auto_find_batch_size=args.auto", [False], None),
        ("arguments = parsed()", [False, True], "test_dryrun_parts.py"),
        ("auto_find_batch_size=True,", [False], None),
        ("from accelerate.utils import find_executable_batch_size", [], None),
        ("@find_executable_batch_size(starting_batch_size=64)", [], "train.py:2"),
    ],
)
def test_that_a_trainer_tries_smaller_batches_is_told_only_if_it_does(
    tmp_path, monkeypatch, line, trainers, told
):
    (tmp_path / "train.py").write_text(f"import torch\n{line}\n")
    module = SimpleNamespace(__file__=str(tmp_path / "train.py"))
    sizing = Sizing()
    sizing.lines = Lines(str(tmp_path))
    for does in trainers:
        arguments = SimpleNamespace(auto_find_batch_size=does)
        sizing.trains(SimpleNamespace(args=arguments), sys._getframe())
    monkeypatch.setattr(sys, "modules", {"train": module})
    found = sizing._reduces()
    assert found == told or (found and told in found)
    # It begins with the largest: its later steps need no more.
    assert sizing._first(_HANDLES) is None


def test_the_steps_of_a_search_are_said_to_be_those_of_its_first_trials(tmp_path):
    lines = Lines(str(Path(__file__).parent))
    search = {"__name__": "optuna.study._optimize"}
    exec("def run(objective):\n    return objective()\n", search)
    found = search["run"](lambda: trials(sys._getframe(), lines))
    assert found["library"] == "optuna" and found["line"].startswith("test_dryrun_parts.py:")
    assert trials(sys._getframe(), lines) is None
    run = {"allocator": "torch", "fits": True, "failed": False, "margin": GIB, "caught": 0}
    said = sentences.verdict({
        "trust": {"reasons": []}, "growth": None, "rest": None, "trials": found,
        "verdict": {"max_bytes": None, "needs": None, "fits": True},
        "gpus": [{"id": "t4-16", "runs": [run], "kernels": True}],
        "program": {"steps": 3, "steps_asked": 3}, "sizing": None,
    })  # fmt: skip
    assert f"the search that begins at {found['line']} (optuna): any later ones" in said


def test_what_torch_compile_generates_is_no_line_of_the_program(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "caches"))
    lines = Lines(str(tmp_path))
    assert lines.name(str(tmp_path / "caches" / "nl" / "cnl7.py")) is None
    assert lines.name(str(tmp_path / "train.py")) == "train.py"


def test_what_torch_geometric_generates_is_no_line_of_the_program(tmp_path):
    lines = Lines(str(tmp_path))
    for name in ("torch_geometric.nn.conv.gat_conv_GATConv_propagate_x.py", "__main___C_p.py"):
        assert lines.name(str(tmp_path / name)) is None
    assert lines.name(f"{tempfile.gettempdir()}/models.gat_OwnConv_propagate_x1.py") is None
    own = "label_propagate_training.py"
    assert lines.name(str(tmp_path / own)) == own
    assert lines.name(str(tmp_path / "torch_geometric_train.py")) == "torch_geometric_train.py"
