"""`gruyere dryrun` as a user runs it; its numbers against those of the same program on the stand-in
without it."""

import json
import os
import subprocess
import sys

import pytest

from conftest import COMMAND, ROOT
from dry_runs import CLOCK, TRAIN, dryrun, row, told
from gruyere._dryrun import live, sentences

MIB = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("dryrun")
    (made / "train.py").write_text(TRAIN)
    return made


@pytest.fixture(scope="module")
def found(folder):
    """The program under every allocator, on a GPU of 2 GiB."""
    ran = dryrun(
        folder, "--gb", 2, "--json", "--html", "page.html", "--history", "runs/dry",
        "train.py", 2048, 50,
    )  # fmt: skip
    return told(ran)


def test_peaks_under_torch_are_those_of_the_same_program_without_dryrun(found, folder, phantom):
    usable = found["gpus"][0]["usable"]
    ran = phantom.run(
        None, "2048", "3", code=TRAIN, allocator="native", PHANTOM_MEMORY=usable, **CLOCK
    ).check()
    allocated, requested = map(int, ran.out.split())
    theirs = row(found, "torch")
    assert theirs["steps"] == 3
    assert (theirs["peak_live"], theirs["peak_requested"]) == (allocated, requested)
    assert theirs["peak_held"] == ran.books["devices"][0]["physical_peak"]
    assert theirs["margin"] == usable - theirs["peak_held"]


def test_a_run_under_torchs_own_allocator_waits_for_the_threads_of_a_backward(tmp_path):
    """torch 2.15 may abort a program that ends behind a backward; the run would have no figures."""
    (tmp_path / "train.py").write_text(
        "import atexit\n"
        "registered, register = [], atexit.register\n"
        "def noting(handler, *arguments, **options):\n"
        "    registered.append(handler.__module__)\n"
        "    return register(handler, *arguments, **options)\n"
        "atexit.register = noting\n"
        "import torch\n"
        "torch.ones(8, device='cuda', requires_grad=True).sum().backward()\n"
        "assert 'gruyere._torch.backward_end' in registered, registered\n"
    )
    told(dryrun(tmp_path, "--alloc", "torch", "--json", "train.py"))


def test_what_nvidias_libraries_take_is_named_one_by_one(found, tmp_path):
    def costs(document):
        return {cost["name"]: cost for cost in document["fixed_costs"]}

    context = found["gpus"][0]["context"]
    assert context["bytes"] == costs(found)["CUDA context"]["bytes"] > 0
    assert not context["known"] and "--context" in context["source"]
    assert costs(found)["kernels and handles"]["bytes"] is None
    # The program calls cuBLAS only.
    assert set(costs(found)) == {"CUDA context", "cuBLAS workspaces", "kernels and handles"}

    (tmp_path / "train.py").write_text(
        "import torch\n"
        "image = torch.empty(2, 3, 64, 64, device='cuda', requires_grad=True)\n"
        "torch.nn.Conv2d(3, 8, 3).cuda()(image).sum().backward()\n"
    )
    ran = dryrun(tmp_path, "--alloc", "torch", "--json", "train.py")
    workspaces = costs(told(ran))["workspaces of cuDNN"]
    assert workspaces["bytes"] is None and not workspaces["known"]
    assert workspaces["source"].startswith("unknown, decided by the library"), workspaces
    assert " x" in workspaces["source"]


@pytest.mark.thorough
def test_two_runs_agree_to_the_byte(found, folder):
    again = told(dryrun(folder, "--gb", 2, "--alloc", "torch", "--json", "train.py", 2048, 50))
    assert row(again, "torch") == row(found, "torch")
    for key in ("peak", "timeline", "trust", "fixed_costs", "program", "machine"):
        assert again[key] == found[key], key


def test_what_is_live_at_the_peak_adds_up_and_is_whose_it_is(found):
    peak = found["peak"]
    for name in ("modules", "lines"):
        assert sum(part["bytes"] for part in peak[name]) == peak["bytes"], name
    assert sum(peak["kinds"].values()) == peak["bytes"]
    # Gruyère and expandable segments count just what the program has.
    assert peak["bytes"] == row(found, "gruyere")["peak_live"]
    assert peak["bytes"] == row(found, "expandable")["peak_live"]

    width = 2048
    sizes = [4 * width * width, 4 * width] * 2 + [4 * 8 * width, 4 * 8]
    weights = sum(live.whole(size) for size in sizes)
    assert peak["kinds"]["weights"] == weights
    # The peak is in cuBLAS's last call of the backward, whose workspace is allocated for the call;
    # the gradient of that layer's bias comes after it.
    assert peak["kinds"]["gradients"] == weights - live.whole(4 * width)
    # Adam's states, and its count of steps, which lies on the host.
    assert peak["kinds"]["optimizer states"] == 2 * weights
    assert peak["kinds"]["other"] == 0
    layers = next(part for part in peak["modules"] if part["module"] == "model.layers.*")
    assert layers["count"] == 2
    assert layers["kinds"]["weights"] == 2 * (live.whole(4 * width * width) + 4 * width)
    # Adam makes what it needs for its step on the line that calls it.
    text = TRAIN.splitlines()
    line = next(part for part in peak["lines"] if part["kinds"].get("optimizer states"))
    assert text[int(line["line"].split(":")[1]) - 1].strip() == "optimizer.step()"
    assert peak["step"] == 3 or peak["step"] == 1


def test_the_timeline_passes_through_the_peak(found):
    kinds = found["timeline"]["kinds"]
    sums = [sum(moment) for moment in zip(*kinds.values())]
    assert max(sums) == found["peak"]["bytes"]
    assert len(found["timeline"]["steps"]) == 2


def test_the_page_is_whole_and_takes_nothing_from_outside(found, folder):
    page = (folder / "page.html").read_text()
    facts = page.split('<script type="application/json" id="facts">')[1].split("</script>")[0]
    assert json.loads(facts)["report"]["peak"] == found["peak"]
    assert page.count("<script") == 2
    for word in ("https://", "src=", "@import", "url(", "fetch(", "innerHTML"):
        assert word not in page.replace(facts, ""), word
    assert "Not checked against silicon" in page


def test_on_a_phone_nothing_of_the_page_is_cut_or_scrolled_sideways(found, folder):
    look = [sys.executable, ROOT / "tests" / "html" / "measure.py", folder / "page.html", "--look"]
    ran = subprocess.run([*look, "--size", "420x900"], capture_output=True, text=True)
    if ran.returncode == 77 and os.environ.get("CI") != "true":
        pytest.skip("lacks chromium")
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert not told["cut"] and not told["exceptions"] and told["drawn"] > 0, told


@pytest.mark.thorough
def test_the_smallest_device_is_really_run(folder, phantom):
    ran = dryrun(
        folder, "--gb", 0.25, "--alloc", "torch", "--context", "96MiB", "--smallest", "--json",
        "train.py", 2048, 50,
    )  # fmt: skip
    document = told(ran, 3)
    torch = row(document, "torch")
    assert not torch["fits"] and torch["margin"] < 0
    smallest = torch["smallest_device"]
    assert torch["smallest_gpu"] == smallest + 96 * MIB

    def at(memory):
        return phantom.run(
            None, "2048", "3", code=TRAIN, allocator="native", PHANTOM_MEMORY=memory, **CLOCK
        )

    at(smallest).check()
    below = smallest - max(4 * MIB, document["peak"]["bytes"] // 200)
    failed = at(below)
    assert failed.code == 1 and "OutOfMemoryError" in failed.err


def test_a_gpu_that_is_too_small_is_told_with_what_lacks(folder):
    ran = dryrun(folder, "--gpu", "t4,h100", "--context", "14.45GiB", "--alloc", "torch",
                 "train.py", 4096, 50)  # fmt: skip
    assert ran.returncode == 3, ran.stdout + ran.stderr
    said = " ".join(ran.stdout.split())
    assert "It does not fit on t4-16:" in said and "It fits these 3 steps on h100-80:" in said
    assert "Not checked against silicon" in ran.stdout


def test_a_bound_is_an_exit_code(folder):
    # Also on a terminal that has no bars.
    ran = dryrun(folder, "--alloc", "torch", "--max-gb", 0.5, "train.py", 256, 50,
                 PYTHONIOENCODING="ascii")  # fmt: skip
    assert ran.returncode == 3, ran.stdout + ran.stderr
    assert "more than the 512 MiB of --max-gb" in " ".join(ran.stdout.split())


# Steps that leave something behind, the first one more (a buffer that is filled before training),
# and what they keep for two of them only.
LEAVES = """
import torch
from collections import deque

model = torch.nn.Linear(512, 512).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
table = torch.empty(3, 1 << 20, device="cuda")
kept, recent = [], deque(maxlen=2)


def main():
    for step in range(9):
        batch = torch.empty(2048, 512, device="cuda")
        recent.append(torch.empty(1 << 20, device="cuda"))
        for _ in range(1 if step else 5):
            out = model(batch)
            if KEEPS:
                kept.append(out)
        out.sum().backward()
        optimizer.step()
        optimizer.zero_grad()


main()
"""


@pytest.mark.thorough
def test_a_leak_that_fits_three_steps_is_told_and_a_queue_is_not(tmp_path):
    for keeps in (True, False):
        (tmp_path / "train.py").write_text(LEAVES.replace("KEEPS", str(keeps)))
        arguments = ["--alloc", "torch", "--gb", 2, "--steps", 4]
        document = told(dryrun(tmp_path, *arguments, "--json", "train.py"))
        if not keeps:
            assert document["growth"] is None
            continue
        # The layer's output; its input is let go with the graph.
        (line,) = [n for n, text in enumerate(LEAVES.splitlines(), 1) if "out = model" in text]
        grown = {"bytes_a_step": 2048 * 512 * 4, "line": f"train.py:{line}"}
        assert document["growth"] == grown
        left = row(document, "torch")["margin"] // grown["bytes_a_step"]
        said = (
            f"But each step leaves 4 MiB behind, most of it at train.py:{line}: if that goes on, "
            f"2gb is full after {left} more steps."
        )
        assert said in sentences.verdict(document)


@pytest.mark.thorough
def test_a_dry_run_is_compared_with_the_last_one_of_its_name(found, folder):
    arguments = "--gb", 2, "--alloc", "torch", "--history", "runs/dry", "train.py", 2304, 50
    ran = dryrun(folder, *arguments)
    assert ran.returncode == 0, ran.stderr
    report = [COMMAND, "report", "--history", "runs/dry", "--name", "train"]
    shown = subprocess.run(
        [*report, "--max-growth", "2%"], cwd=folder, capture_output=True, text=True
    )
    assert shown.returncode == 4, shown.stdout + shown.stderr
    assert "2gb under torch: live at the peak grew by" in shown.stdout
    assert "against  dry run train" in shown.stdout and "train.py 2048 50, 3 steps" in shown.stdout
    told = json.loads(subprocess.run([*report, "--json"], cwd=folder, capture_output=True).stdout)
    (gpu,) = told["gpus"]
    assert gpu["before"]["peak_live"] == row(found, "torch")["peak_live"]
    kinds = {kind["name"]: kind for kind in told["kinds"]}
    # Two square layers and a head of eight rows, and their biases.
    weights = [4 * (2 * width * width + 8 * width + 2 * width + 8) for width in (2048, 2304)]
    for key, expected in zip(("before", "now"), weights):
        assert kinds["weights"][key] == pytest.approx(expected, rel=0.01)
    assert told["run"]["command"] == "train.py 2304 50" and not told["worse"]


# A block that is checkpointed: torch's two ways with a plain function, and the way of others, who
# run modules in a backward of their own.
RECOMPUTES = """
import json, os, sys
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from gruyere._dryrun.lines import Lines
from gruyere._dryrun.live import analyse
from gruyere._dryrun.hooks import Hooks

way, rows, width, wide = sys.argv[1], *map(int, sys.argv[2:])
looks = Hooks(torch, Lines(os.getcwd()))
looks.install()
block = nn.Sequential(nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width)).cuda()
first, _, second = block


def function(x):
    x = nn.functional.gelu(x @ first.weight.t() + first.bias)
    return x @ second.weight.t() + second.bias


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(block(x), gradient)
        return x.grad


for _ in range(2):
    x = torch.ones(rows, width, device="cuda", requires_grad=True)
    if way == "own":
        out = Own.apply(x)
    else:
        out = checkpoint(function, x, use_reentrant=way == "reentrant")
    loss = out.sum()
    loss.backward()
    block.zero_grad()
    del x, out, loss
    looks.step_is_over()
looks.close()
trace = torch.cuda.memory._snapshot()["device_traces"][0]
print(json.dumps(analyse(trace, looks.seen, looks.lines)))
"""


@pytest.mark.parametrize("way", ["reentrant", "not", "own"])
def test_what_checkpointing_computes_again_is_told_as_that(phantom, way):
    rows, width, wide = 256, 512, 2048
    ran = phantom.run(
        None, way, rows, width, wide, code=RECOMPUTES, PYTHONPATH=ROOT / "python_loader"
    ).check()
    inner, outer = 4 * rows * wide, 4 * rows * width
    wanted = {
        # The sum with the first bias, whose product has gone; what GELU makes of it; the second
        # product, and its sum.
        "reentrant": 2 * inner + 2 * outer,
        # It ends when all that is to be kept is there: before the second product.
        "not": 2 * inner,
        # A layer is one operator here.
        "own": 2 * inner + outer,
    }[way]
    kinds = ran.report["timeline"]["kinds"]
    assert max(kinds["recomputed"]) == wanted
    assert kinds["recomputed"][-1] == 0


CAUGHT = """
import torch

model = torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = 1 << 19
for _ in range(9):
    try:
        model(torch.empty(rows, 1024, device="cuda")).sum().backward()
        optimizer.step()
    except torch.cuda.OutOfMemoryError:
        rows //= 8
"""


def test_memory_that_ran_out_and_was_caught_is_told(tmp_path):
    (tmp_path / "train.py").write_text(CAUGHT)
    ran = dryrun(tmp_path, "--gb", 2, "--alloc", "torch", "--json=all.json", "train.py")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "(It ran out of memory once there, caught the error and went on.)" in " ".join(
        ran.stdout.split()
    )
    row = json.loads((tmp_path / "all.json").read_text())["gpus"][0]["runs"][0]
    assert (row["fits"], row["steps"], row["caught"]) == (True, 3, 1)


# It is killed before it can tell anything, and it is not the program's own process.
OTHERS = """
import subprocess
import sys
import torch

kept = torch.zeros(1000, device="cuda")
another = "import os, torch; kept = torch.zeros(1000, device='cuda'); os.kill(os.getpid(), 9)"
subprocess.run([sys.executable, "-c", another])
"""


@pytest.mark.thorough
def test_processes_that_use_the_device_beside_the_programs_own_are_told(tmp_path):
    (tmp_path / "train.py").write_text(OTHERS)
    ran = dryrun(tmp_path, "--alloc", "torch", "train.py")
    assert ran.returncode == 4, ran.stdout + ran.stderr
    assert "1 other process of the program used the device" in " ".join(ran.stdout.split())


def test_wrong_arguments_are_refused_before_anything_runs(tmp_path):
    ran = dryrun(tmp_path, "gone.py")
    assert ran.returncode == 2 and "gone.py: no such file" in ran.stderr
    (tmp_path / "train.py").write_text("")
    ran = dryrun(tmp_path, "--html", "no/such/page.html", "train.py")
    assert ran.returncode == 2 and "no/such/page.html" in ran.stderr


@pytest.mark.thorough
def test_a_sweep_finds_the_largest_that_fits(tmp_path):
    (tmp_path / "train.py").write_text(
        "import sys, torch\n"
        "kept = [torch.empty(20 << 20, dtype=torch.uint8, device='cuda')\n"
        "        for _ in range(int(sys.argv[2]))]\n"
    )
    ran = dryrun(
        tmp_path, "--gb", 0.25, "--context", "64MiB", "--alloc", "torch", "--sweep",
        "count=--count:1..12", "--json", "train.py",
    )  # fmt: skip
    document = told(ran)
    # 192 MiB are left.
    wanted = {"gpu": "0.25gb", "allocator": "torch", "value": "9"}
    assert document["sweep"]["largest"] == [wanted]
    fits = {row["value"]: row["fits"] for row in document["sweep"]["rows"]}
    assert fits == {"1": True, "12": False, "6": True, "9": True, "10": False}
    assert document["program"]["arguments"] == ["--count", "9"]
    assert document["peak"]["kinds"]["other"] == document["peak"]["bytes"] == 180 * MIB


@pytest.mark.thorough
def test_the_values_of_a_list_are_all_run(folder):
    ran = dryrun(folder, "--alloc", "torch", "--steps", 1, "--sweep", "width=64,128", "--json",
                 "train.py", "{width}", 1)  # fmt: skip
    document = told(ran)
    assert [row["value"] for row in document["sweep"]["rows"]] == ["64", "128"]
    assert document["program"]["arguments"] == ["128", "1"]
