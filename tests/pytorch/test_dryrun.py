"""`gruyere dryrun` as a user runs it; its numbers against those of the same program on the stand-in
without it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import types
from pathlib import Path
from types import SimpleNamespace

import pytest

from conftest import (
    COMMAND,
    GRUYERE,
    LIBRARIES,
    LIBRARIES_PRELOADED,
    PHANTOM,
    ROOT,
    clean_environment,
)
from framework_runs import PYTHON as FRAMEWORKS

sys.path.insert(0, str(ROOT / "python_loader"))

from gruyere._bench.measure import COMPLETED, FAILED, OUT_OF_MEMORY  # noqa: E402
from gruyere._bench.runners import blame  # noqa: E402
from gruyere._bench.script import Enough  # noqa: E402
from gruyere._dryrun import answers, live, text, trust  # noqa: E402
from gruyere._dryrun.identity import ByIdentity, named_modules, named_tensors  # noqa: E402
from gruyere._dryrun.hooks import Seen  # noqa: E402
from gruyere._dryrun.main import DryRun  # noqa: E402
from gruyere._dryrun.runs import Plan, Ran  # noqa: E402
from gruyere._dryrun.settings import Settings  # noqa: E402
from gruyere._dryrun.sweep import Sweep  # noqa: E402
from gruyere._dryrun.worker import UNUSABLE, Found, Worker  # noqa: E402
from gruyere._sandbox.reach import Reach  # noqa: E402

GIB, MIB = 1 << 30, 1 << 20
# What takes time on the stand-in's clock, as the dry run has it.
CLOCK = {"PHANTOM_KERNEL_NS": "20000", "PHANTOM_COSTS": "launches"}

# Two layers that repeat, with a head; Adam; the numbers that torch has at the end on stdout.
TRAIN = """
import sys
import torch
from torch import nn

width, steps = int(sys.argv[1]), int(sys.argv[2])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, 8)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x)


def report():
    if torch.cuda.is_initialized():
        statistics = torch.cuda.memory_stats()
        print(statistics["allocated_bytes.all.peak"], statistics["requested_bytes.all.peak"])


model = Model().cuda()
optimizer = torch.optim.Adam(model.parameters())
try:
    for step in range(steps):
        batch = torch.empty(256 + 64 * step, width, device="cuda")
        loss = model(batch).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
finally:
    report()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("dryrun")
    (made / "train.py").write_text(TRAIN)
    return made


def dry(*arguments, python=sys.executable):
    """The command line, and the environment for it."""
    environment = clean_environment() | {
        "GRUYERE_LIBRARY": str(GRUYERE), "GRUYERE_PHANTOM": str(PHANTOM), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    line = [COMMAND, "dryrun", "--python", python, *arguments]
    return [str(word) for word in line], environment


def dryrun(folder, *arguments, python=sys.executable, **settings):
    line, environment = dry(*arguments, python=python)
    return subprocess.run(
        line,
        env=environment | settings,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
    )


def told(ran, code=0):
    """The JSON of a run with `--json`."""
    assert ran.returncode == code, ran.stdout + ran.stderr
    document = json.loads(ran.stdout)
    assert (document["schema"], document["version"]) == ("gruyere.dryrun", 1)
    assert document["verdict"]["exit"] == code
    return document


@pytest.fixture(scope="module")
def found(folder):
    """The program under every allocator, on a GPU of 2 GiB."""
    ran = dryrun(
        folder, "--gb", 2, "--json", "--html", "page.html", "--history", "runs/dry",
        "train.py", 2048, 50,
    )  # fmt: skip
    return told(ran)


def row(document, allocator):
    return next(row for row in document["gpus"][0]["runs"] if row["allocator"] == allocator)


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
        folder, "--gb", 0.25, "--alloc", "torch", "--context", "64MiB", "--smallest", "--json",
        "train.py", 2048, 50,
    )  # fmt: skip
    document = told(ran, 3)
    torch = row(document, "torch")
    assert not torch["fits"] and torch["margin"] < 0
    smallest = torch["smallest_device"]
    assert torch["smallest_gpu"] == smallest + 64 * MIB

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


# What the stand-in invents is in the environment too, where every stand-in has it.
BRANCHES = """
import os
import torch

model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    out = model(torch.empty(8, 64, device="cuda")).sum()
    if {condition}:
        more = torch.empty(1 << 20, device="cuda")
    out.backward()
    optimizer.step()
"""


# Steps that leave something behind, and what they keep for two of them only.
LEAVES = """
import torch
from collections import deque

model = torch.nn.Linear(512, 512).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
table = torch.empty(3, 1 << 20, device="cuda")
kept, recent = [], deque(maxlen=2)


def main():
    for _ in range(9):
        batch = torch.empty(2048, 512, device="cuda")
        recent.append(torch.empty(1 << 20, device="cuda"))
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
        assert said in text.verdict(document)


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


@pytest.mark.thorough
@pytest.mark.parametrize(
    "condition", ['os.environ["PHANTOM_VALUES"] != "zeros"', "out.item() != 0"]
)
def test_a_program_that_asks_by_values_of_the_device_is_not_trusted(tmp_path, condition):
    if "item" in condition and b"PHANTOM_VALUES" not in PHANTOM.read_bytes():
        pytest.skip("this stand-in has no values of its own")
    (tmp_path / "train.py").write_text(BRANCHES.format(condition=condition))
    ran = dryrun(tmp_path, "--alloc", "torch", "--json=all.json", "train.py")
    assert ran.returncode == 4, ran.stdout + ran.stderr
    _, first, second, *_ = ran.stdout.splitlines()
    assert first.startswith("Not trustworthy: ") and "train.py:10" in first + second
    document = json.loads((tmp_path / "all.json").read_text())
    assert document["trust"]["difference"]["line"] == "train.py:10"
    if "item" in condition:
        assert document["trust"]["difference"]["read"] == "train.py:9"
        read = {"line": "train.py:9", "what": "item", "inside": "", "count": 3}
        assert document["trust"]["reads"] == [read]
        assert document["trust"]["host_reads"]["count"] == 3


# Each line that reads from the device ends with the name under which that is told, and how often.
READS = """
import torch

model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.empty(64, device="cuda")
mask = torch.empty(64, device="cuda") > 0
torch.nonzero(x)  # operator 1
torch.where(mask)  # operator 1
x.masked_select(mask)  # operator 1
x.unique()  # operator 1
mask.long().bincount()  # operator 2
torch.equal(x, x + 1)  # operator 1
x.cpu().numpy()  # cpu 1
torch.empty(64).copy_(x)  # operator 1
x.to("cpu", torch.double)  # to 1
x[mask] = 1
x.masked_fill_(mask, 2)
x.nonzero_static(size=8)
if x.any():  # bool 1
    pass


class Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * gradient[gradient > 0].numel()  # operator 1


def kept(x):
    return x[torch.empty(8, device="cuda") > 0]  # operator 1


out = kept(Masked.apply(model(torch.ones(8, 64, device="cuda"))))
out.sum().backward()  # operator 1
optimizer.step()
"""


@pytest.mark.thorough
def test_every_read_of_the_device_has_its_line_also_where_the_runs_part(tmp_path):
    (tmp_path / "train.py").write_text(READS)
    document = told(dryrun(tmp_path, "--alloc", "torch", "--json", "train.py"), 4)
    wanted = {
        (f"train.py:{number}", *line.rpartition("  # ")[2].split())
        for number, line in enumerate(READS.splitlines(), 1)
        if "  # " in line
    }
    trust = document["trust"]
    found = {(read["line"], read["what"], str(read["count"])) for read in trust["reads"]}
    assert found == wanted
    assert trust["host_reads"]["count"] == sum(read["count"] for read in trust["reads"])
    line = READS[: READS.index("torch.nonzero")].count("\n") + 1
    parted = trust["difference"]
    assert parted["line"] == parted["read"] == f"train.py:{line}"


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


SCALED = """
import torch
import torch.distributed as dist

dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cuda")
for _ in range(5):
    with torch.autocast("cuda", torch.float16):
        loss = model(torch.ones(8, 64, device="cuda")).sum()
    scaler.scale(loss).backward()
    print(loss)
    objects = [None]
    dist.all_gather_object(objects, {"loss": 1})
    assert objects == [{"loss": 1}]
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""


def test_what_a_scaler_a_print_and_a_gathering_ask_is_answered_and_told(tmp_path):
    (tmp_path / "train.py").write_text(SCALED)
    document = told(dryrun(tmp_path, "--alloc", "torch", "--json", "train.py"))
    assert document["program"]["steps"] == 3
    assert document["trust"]["reasons"] == []
    asked = (answers.INFINITE, answers.PRINTED, answers.OBJECTS)
    assert document["trust"]["answered"] == dict.fromkeys(asked, 3)


def test_deepspeed_is_told_that_no_gradient_is_infinite():
    utils = types.ModuleType("deepspeed.runtime.utils")
    exec(
        "asked = []\n"
        "def has_inf_or_nan(x):\n    asked.append(x)\n    return True\n"
        "class CheckOverflow:\n"
        "    def has_overflow(self, params):\n        return any(map(has_inf_or_nan, params))\n",
        vars(utils),
    )
    asks = answers.Answers()
    asks._overflows(utils)
    assert utils.CheckOverflow().has_overflow([1, 2]) is False
    # Of each, since none of them ended the search.
    assert utils.asked == [1, 2]
    assert asks.answered == {answers.OVERFLOW: 3}


def test_generation_ends_at_its_greatest_length_whatever_the_device_says():
    class MaxLengthCriteria:
        max_length = 8

        def __call__(self, input_ids, scores):
            return "on the device"

    class GenerationMixin:
        def _has_unfinished_sequences(self, this_peer_finished, synced_gpus, device):
            return not this_peer_finished

    asks = answers.Answers()
    asks._lengths(types.SimpleNamespace(MaxLengthCriteria=MaxLengthCriteria))
    asks._generation(types.SimpleNamespace(GenerationMixin=GenerationMixin))
    for _ in range(2):
        mixin, length, invented = GenerationMixin(), 3, False
        while mixin._has_unfinished_sequences(invented, False, device="cuda"):
            length += 1
            tokens = types.SimpleNamespace(shape=(2, length))
            assert MaxLengthCriteria()(tokens, None) == "on the device"
            invented = length == 5
        assert length == 8
    assert asks.answered == {answers.GENERATED: 2}


# A layer that convolves by Fourier transforms, and an optimiser that takes roots of matrices.
FACTORS = """
import torch

weight = torch.nn.Parameter(torch.nn.init.orthogonal_(torch.empty(64, 64, device="cuda")))


class Whitened(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        gradient = weight.grad
        values, vectors = torch.linalg.eigh(gradient @ gradient.t())
        root = vectors @ torch.diag(values.clamp_min(1e-6) ** -0.5) @ vectors.t()
        weight.sub_(torch.linalg.solve(root, gradient) + torch.linalg.inv(root))


optimizer = Whitened([weight], {})
for _ in range(5):
    x = torch.ones(16, 64, device="cuda")
    product = torch.fft.rfft(x, n=128) @ torch.fft.rfft(weight, n=128).t()
    torch.fft.irfft(product).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.thorough
def test_a_program_that_factors_matrices_is_trusted_and_what_that_takes_is_told(tmp_path):
    (tmp_path / "train.py").write_text(FACTORS)
    document = told(dryrun(tmp_path, "--alloc", "torch", "--json", "train.py"))
    assert document["program"]["steps"] == 3
    # Of eigh, solve and inv.
    assert document["trust"]["answered"] == {"torch.linalg: every matrix could be factored": 3 * 3}
    unknown = {
        cost["name"]: cost["source"] for cost in document["fixed_costs"] if cost["bytes"] is None
    }
    # orthogonal_, once.
    assert "cusolverDnSorgqr x1" in unknown["workspaces of cuSOLVER"]
    # Two lengths there, one back, and the gradients of two.
    assert unknown["workspaces of cuFFT"].endswith("cufftXtMakePlanMany x5")
    assert "workspaces of cuDNN" not in unknown


# Training as frameworks drive it, which would go on long after three steps.
TRAINER = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        row = torch.zeros(32, dtype=torch.long)
        return {"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)}


shape = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                    num_attention_heads=2, vocab_size=100)
arguments = TrainingArguments("out", report_to=[], save_strategy="epoch", logging_steps=1)
trainer = Trainer(model=LlamaForCausalLM(shape), args=arguments, train_dataset=Rows())
try:
    trainer.train()
finally:
    open("ended", "w").close()
open("went on", "w").close()
"""
LIGHTNING = """
import pytorch_lightning as pl
import torch


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(64, 64)

    def training_step(self, batch, _):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

    def on_fit_end(self):
        open("ended", "w").close()


data = torch.utils.data.TensorDataset(torch.zeros(4096, 64))
trainer = pl.Trainer(max_epochs=2, accelerator="gpu", devices=1, logger=False,
                     enable_checkpointing=False, enable_progress_bar=False)
trainer.fit(Model(), torch.utils.data.DataLoader(data, batch_size=8))
open("went on", "w").close()
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    "program, module", [(TRAINER, "LlamaForCausalLM.model"), (LIGHTNING, "Model.net")]
)
def test_a_trainer_is_asked_to_stop_and_can_be_trusted(tmp_path, program, module):
    (tmp_path / "train.py").write_text(program)
    ran = dryrun(
        tmp_path, "--allow-writes=.", "--alloc", "torch", "--json", "train.py", python=FRAMEWORKS
    )
    document = told(ran)
    # Lightning stops at the end of an epoch at the earliest, if nobody makes it.
    assert 3 <= document["program"]["steps"] <= 5
    assert document["trust"]["reasons"] == []
    assert (tmp_path / "ended").exists() and not (tmp_path / "went on").exists()
    assert not list(tmp_path.glob("out/checkpoint*")), "nothing is saved that was not trained"
    assert any(row["module"].startswith(module) for row in document["peak"]["modules"])


# What programs do that measure and tune themselves: the figures are of the whole run all the same,
# and each row has its own allocator. An average of the weights has no forward; a nested backward
# and a step inside of one; a gradient that is sparse; an end that fails because it came early.
OF_ITS_OWN = """
import os

os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True,max_split_size_mb:64"
import copy
import gruyere
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

gruyere.enable(limit="90%")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(16, 1024, sparse=True)
        self.first = nn.Linear(1024, 1024)
        self.second = nn.Linear(1024, 1024)

    def forward(self, rows):
        return self.second(checkpoint(self.first, self.table(rows), use_reentrant=True))


def step_in_backward(model):
    for layer in (model.first, model.second):
        for parameter in layer.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1)

            def step(value, optimizer=optimizer):
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)


def main():
    model = Model().cuda()
    average = copy.deepcopy(model)
    step_in_backward(model)
    for _ in range(9):
        torch.cuda.memory._record_memory_history()
        rows = torch.zeros(4096, dtype=torch.long, device="cuda")
        loss = model(rows).sum()
        torch.cuda.memory._record_memory_history(enabled=None)
        loss.backward()
        torch.cuda.reset_peak_memory_stats()
    return average


try:
    main()
finally:
    print(summary)
"""


@pytest.mark.thorough
def test_what_a_program_measures_and_sets_by_itself_changes_no_answer(tmp_path):
    (tmp_path / "train.py").write_text(OF_ITS_OWN)
    document = told(dryrun(tmp_path, "--alloc", "gruyere,expandable", "--json", "train.py"))
    assert document["trust"]["reasons"] == []
    assert document["program"]["left_out"] == [
        "expandable_segments:True,max_split_size_mb:64", "gruyere.enable(limit='90%')",
    ]  # fmt: skip
    peak = document["peak"]
    for run in document["gpus"][0]["runs"]:
        assert (run["fits"], run["steps"], run["peak_live"]) == (True, 3, peak["bytes"])
    layer, rows = 4 * 1024 * 1024 + 4 * 1024, 4096
    weights = 4 * 16 * 1024 + 2 * layer
    assert peak["kinds"] == {
        "weights": 2 * weights,
        # The first layer's, and the table's of the step before: values and indices.
        "gradients": layer + rows * (4 * 1024 + 8),
        "optimizer states": 0,
        # The checkpoint's input, the rows, the loss and its gradient.
        "activations": rows * (4 * 1024 + 8) + 2 * 512,
        # The rows behind the checkpointed layer.
        "recomputed": rows * 4 * 1024,
        "temporaries": peak["kinds"]["temporaries"],
        "workspaces": peak["kinds"]["workspaces"],
        "other": 0,
    }
    text = OF_ITS_OWN.splitlines()
    lines = {text[int(part["line"].split(":")[1]) - 1].strip() for part in peak["lines"]}
    assert "loss.backward()" in lines


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
    assert "(It ran out of memory 1 time there, caught the error and went on.)" in " ".join(
        ran.stdout.split()
    )
    row = json.loads((tmp_path / "all.json").read_text())["gpus"][0]["runs"][0]
    assert (row["fits"], row["steps"], row["caught"]) == (True, 3, 1)


# A program that takes as much as it may.
ASKS = """
import sys
import torch

wanted, context = map(int, sys.argv[1:])
free, total = torch.cuda.mem_get_info()
assert total == torch.cuda.get_device_properties(0).total_memory == wanted, (total, wanted)
assert context <= total - free <= context + (64 << 20), (free, total)
# Only here is the device's name the GPU's alone.
assert "stand-in" not in torch.cuda.get_device_name(), torch.cuda.get_device_name()
torch.cuda.set_per_process_memory_fraction(0.5)
blocks = []
try:
    while True:
        blocks.append(torch.empty(64 << 20, dtype=torch.uint8, device="cuda"))
except torch.cuda.OutOfMemoryError:
    pass
# Half of what the context leaves would be 5 blocks less; torch holds segments of 20 MiB.
assert 0 <= total // 2 // (64 << 20) - len(blocks) <= 1, len(blocks)
"""


@pytest.mark.thorough
def test_a_program_that_asks_is_told_the_gpus_total_and_the_contexts_part_as_taken(tmp_path):
    (tmp_path / "train.py").write_text(ASKS)
    ran = dryrun(tmp_path, "--gb", 8, "--context", "640MiB", "--json", "train.py",
                 8 << 30, 640 << 20)  # fmt: skip
    document = told(ran)
    assert [row["outcome"] for row in document["gpus"][0]["runs"]] == ["completed"] * 3
    assert document["gpus"][0]["usable"] == (8 << 30) - (640 << 20)


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


@pytest.mark.parametrize(
    "program, reason",
    [
        ("import torch\ntorch.zeros(1)\n", "there is nothing to measure: the program used no"),
        ("import os\nos._exit(0)\n", "exit code 0 before it could be measured"),
    ],
)
def test_a_run_without_figures_says_why_and_leaves_no_file(tmp_path, program, reason):
    (tmp_path / "train.py").write_text(program)
    ran = dryrun(tmp_path, "--json=all.json", "--html", "page.html", "train.py")
    assert ran.returncode == 1 and ran.stdout == "", ran.stdout + ran.stderr
    assert reason in ran.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["train.py"]


# The first two runs are looked at, one after the other; the next ones are beside each other.
WAITS = """
import os
import pathlib
import time
import torch

kept = torch.zeros(1000, device="cuda")
pathlib.Path(f"began-{os.getpid()}").touch()
if len(list(pathlib.Path().glob("began-*"))) > RUNS:
    time.sleep(600)
"""


def runs_still(pid):
    """Nobody may be there to take a dead orphan away."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.thorough
@pytest.mark.parametrize(
    "number, runs", [(signal.SIGINT, 2), (signal.SIGTERM, 0), (signal.SIGKILL, 2)]
)
def test_who_ends_it_ends_the_programs_and_leaves_nothing(tmp_path, number, runs):
    (tmp_path / "tmp").mkdir()
    (tmp_path / "train.py").write_text(WAITS.replace("RUNS", str(runs)))
    line, environment = dry(
        "--allow-writes=.", "--alloc", "gruyere,torch", "--jobs", 2, "train.py"
    )  # fmt: skip
    process = subprocess.Popen(
        line, env=environment | {"TMPDIR": str(tmp_path / "tmp")}, cwd=tmp_path,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        # A shell that starts it behind itself has it pass over the first.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 300
        while len(list(tmp_path.glob("began-*"))) <= runs:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
        process.send_signal(number)
        assert process.wait(30) == (128 + number if number != signal.SIGKILL else -number)
    finally:
        process.kill()
    if number != signal.SIGKILL:
        # torch keeps a folder of its own there.
        # The native door's shim is kept there where there is no other place for it.
        shims = f"gruyere-{os.getuid()}"
        left = [path for path in (tmp_path / "tmp").glob("gruyere-*") if path.name != shims]
        assert not left
    pids = [file.name.split("-")[1] for file in tmp_path.glob("began-*")]
    deadline = time.monotonic() + 30
    while alive := [pid for pid in pids if runs_still(pid)]:
        # Who was killed ended nobody; the kernel does.
        assert number == signal.SIGKILL and time.monotonic() < deadline, alive
        time.sleep(0.1)


SWALLOWS = """
import atexit
import torch

model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
atexit.register(lambda: open("atexit", "a").write("ran "))
step = 0
while True:
    try:
        model(torch.empty(8, 64, device="cuda")).sum().backward()
        optimizer.step()
    except Exception:
        print("goes on")
    finally:
        step += 1
    assert step < 10
"""


@pytest.mark.thorough
def test_a_program_that_swallows_exceptions_ends_after_its_steps(tmp_path):
    (tmp_path / "train.py").write_text(SWALLOWS)
    ran = dryrun(
        tmp_path, "--allow-writes=.", "--alloc", "torch", "--steps", 2, "--json", "train.py"
    )
    assert told(ran)["program"]["steps"] == 2
    assert (tmp_path / "atexit").read_text() == "ran " * 3


# What most programs do: a transform that is a module (torchvision's are) runs in the loader's
# workers, one of which trains it too; a metric's `==` makes another metric (torchmetrics').
WORKERS = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Metric(nn.Module):
    def __init__(self, *parts):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def __eq__(self, other):
        return Metric(self, other)

    def __hash__(self):
        return 1

    def forward(self, x):
        return x.detach().mean()


class Data(Dataset):
    transform = nn.Sequential(nn.Linear(64, 64))

    def __len__(self):
        return 64

    def __getitem__(self, index):
        out = self.transform(torch.ones(64))
        out.sum().backward()
        torch.optim.SGD(self.transform.parameters(), lr=0.1).step()
        assert out.sum().item() != 7
        return out.detach()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.metrics = nn.ModuleDict({"mean": Metric(), "loss": Metric()})

    def forward(self, x):
        out = self.layer(x)
        for metric in self.metrics.values():
            metric(out)
        return out


model = Model().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in DataLoader(Data(), 16, num_workers=2):
    model(batch.cuda()).sum().backward()
    optimizer.step()
"""


@pytest.mark.thorough
def test_loader_workers_are_left_alone_and_modules_are_told_apart_whatever_they_equal(tmp_path):
    (tmp_path / "train.py").write_text(WORKERS)
    document = told(dryrun(tmp_path, "--alloc", "torch", "--json", "train.py"))
    assert document["program"]["steps"] == 3 and document["verdict"]["fits"]
    weights = {row["module"]: row["kinds"] for row in document["peak"]["modules"]}
    assert weights["model.layer"]["weights"] == 64 * 64 * 4 + 512


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


@pytest.mark.thorough
def test_a_program_with_a_port_of_its_own_finds_it_free_in_every_run(tmp_path):
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        port = any_port.getsockname()[1]
    server = f"""
import socket
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind(("127.0.0.1", {port}))
server.listen()
"""
    (tmp_path / "train.py").write_text(server + TRAIN)
    arguments = ["--gb", 2, "--alloc", "gruyere,torch,expandable", "--jobs", 2, "--json"]
    document = told(dryrun(tmp_path, *arguments, "train.py", 512, 3))
    assert [run["fits"] for run in document["gpus"][0]["runs"]] == [True] * 3


# Under one allocator it dies, as a library does that calls what is not there; it warned before.
DIES = """
import ctypes
import os
import warnings

if "expandable" in os.environ.get("PYTORCH_ALLOC_CONF", ""):
    warnings.warn("of something else", UserWarning)
    ctypes.string_at(0)
"""


@pytest.mark.thorough
def test_a_row_that_fails_leaves_the_others_standing(tmp_path):
    (tmp_path / "train.py").write_text(DIES + TRAIN)
    arguments = ["--gb", 2, "--alloc", "torch,expandable", "--jobs", 2, "--json=all.json"]
    ran = dryrun(tmp_path, *arguments, "--html", "page.html", "train.py", 64, 3)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    document = json.loads((tmp_path / "all.json").read_text())
    assert (document["verdict"]["exit"], document["verdict"]["word"]) == (1, "failed")
    fine, failed = row(document, "torch"), row(document, "expandable")
    assert fine["fits"] and not fine["failed"] and document["gpus"][0]["fits"]
    assert (failed["outcome"], failed["fits"], failed["failed"]) == ("failed", False, True)
    assert failed["peak_held"] is failed["margin"] is None
    reason = "killed by SIGSEGV: Fatal Python error: Segmentation fault, File "
    assert failed["reason"].startswith(reason) and "string_at" in failed["reason"]
    assert document["verdict"]["needs"] == fine["peak_held"] + document["fixed_costs"][0]["bytes"]
    said = " ".join(ran.stdout.split())
    assert "It fits these 3 steps on 2gb: " in said
    assert " to spare with torch. On 2gb it failed with " in said
    assert "not with" not in said and " expandable failed - - - - " in said
    assert "the program failed under expandable on 2gb: killed by SIGSEGV" in ran.stderr
    assert '"failed": true' in (tmp_path / "page.html").read_text()


WARNED = [
    "/x/torch/functional.py:307: UserWarning: Failed to initialize NumPy: No module named 'numpy'",
    "  cpu = _conversion_method_template(device=torch.device('cpu'))",
]
TRACED = [
    "Traceback (most recent call last):",
    '  File "train.py", line 3, in <module>',
    "    raise KeyError('mine')",
    "KeyError: 'mine'",
]
FAULT = [
    "Fatal Python error: Aborted", "", "Thread 0x01 (most recent call first):",
    '  File "other.py", line 1 in wait', "", "Current thread 0x02 (most recent call first):",
    '  File "train.py", line 7 in step', '  File "train.py", line 9 in <module>',
    "Extension modules: numpy (total: 1)",
]  # fmt: skip


@pytest.mark.parametrize(
    "how, said, reason",
    [
        ("killed by SIGSEGV", WARNED, "killed by SIGSEGV, without any output"),
        ("killed by SIGSEGV", ["begins", "", *WARNED], "killed by SIGSEGV: begins"),
        ("exit code 1", [*TRACED, "cleaning up", *WARNED], "exit code 1: KeyError: 'mine'"),
        # One that was caught, long before.
        ("killed by SIGKILL", [*TRACED, "goes on"], "killed by SIGKILL: goes on"),
        (
            "killed by SIGABRT",
            ["terminate called after throwing an instance of 'E'", "  what():  why", *FAULT],
            "killed by SIGABRT: terminate called after throwing an instance of 'E', what():  why, "
            'Fatal Python error: Aborted, File "train.py", line 7 in step',
        ),
        (
            "exit code 127",
            ["python: symbol lookup error: a.so: undefined symbol: b", *WARNED],
            "exit code 127: python: symbol lookup error: a.so: undefined symbol: b",
        ),
    ],
)
def test_the_reason_of_a_failure_is_no_warning_and_no_line_that_happens_to_be_last(
    how, said, reason
):
    assert blame(how, said) == reason


def test_a_program_that_fails_shows_its_own_traceback(tmp_path):
    (tmp_path / "train.py").write_text("import torch\ntorch.cuda.init()\nraise KeyError('mine')\n")
    ran = dryrun(tmp_path, "train.py")
    assert ran.returncode == 1 and ran.stdout == ""
    said = ran.stderr.splitlines()
    first = said.index("Traceback (most recent call last):")
    # As under plain python: no frame of ours before the program's.
    traced = [line for line in said[first:] if line.startswith(("  File ", "Key"))]
    assert traced == [f'  File "{tmp_path}/train.py", line 3, in <module>', "KeyError: 'mine'"]
    assert said[-1].startswith("gruyere dryrun: the program failed under torch on h100-80: Key")


def test_a_program_that_asks_its_empty_stdin_is_told_what_to_do(tmp_path):
    (tmp_path / "train.py").write_text("import torch\nsize = int(input('size? '))\n")
    ran = dryrun(tmp_path, "train.py")
    assert ran.returncode == 1 and ran.stdout == ""
    last = ran.stderr.splitlines()[-1]
    assert "EOFError: EOF when reading a line. The program's stdin is empty here: pass " in last


@pytest.mark.parametrize("command", ["dryrun", "compare"])
def test_a_program_of_another_kind_is_refused_and_its_reason_says_what_to_name(tmp_path, command):
    (tmp_path / "train.sh").write_text("#!/usr/bin/env bash\npython train.py\n")
    (tmp_path / "train.sh").chmod(0o755)
    environment = dry()[1] | {"VIRTUAL_ENV": sys.prefix}
    for program in ("bash", "/bin/bash", "train.sh"):
        ran = subprocess.run(
            [COMMAND, command, "--", program, "x"],
            env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert (ran.returncode, ran.stdout) == (2, ""), ran.stderr
        said = f"gruyere {command}: {program}: not a Python program, and only those are run: "
        assert ran.stderr.startswith(said) and "-m package.train" in ran.stderr, ran.stderr


@pytest.mark.parametrize(
    "torch, code, reason",
    [
        (None, 2, "has no torch"),
        ("__version__ = '2.11.0'\nclass version:\n    cuda = None", 2, "is built without CUDA"),
    ],
)
def test_a_torch_that_cannot_serve_is_said(tmp_path, torch, code, reason):
    (tmp_path / "train.py").write_text("import torch\n")
    if torch:
        (tmp_path / "torch.py").write_text(torch)
    ran = dryrun(tmp_path, "train.py", python=sys._base_executable, PYTHONPATH=str(tmp_path))
    assert ran.returncode == code, ran.stdout + ran.stderr
    assert reason in ran.stderr


ONE = "import torch\ntorch.zeros(1000, device='cuda')\n"


@pytest.mark.thorough
def test_paths_with_blanks_and_colons_reach_the_loader_of_libraries(tmp_path):
    odd = tmp_path / "a folder: of $ORIGIN; mine"
    (odd / "tmp").mkdir(parents=True)
    library = odd / PHANTOM.name
    library.symlink_to(PHANTOM)
    (odd / "train.py").write_text(ONE)
    settings = {"GRUYERE_PHANTOM": str(library), "TMPDIR": str(odd / "tmp")}
    document = told(dryrun(odd, "--alloc", "torch", "--json", "train.py", **settings))
    assert document["gpus"][0]["runs"][0]["peak_live"] == 4096


@pytest.mark.parametrize(
    "change, reason",
    [
        ("unset LD_PRELOAD", "LD_PRELOAD, which loads it, was removed from the environment"),
        # A machine without a driver has none, another has the driver's.
        ("unset LD_LIBRARY_PATH", "libcuda.so.1 "),
        ("export LD_LIBRARY_PATH=FOLDER", "libcuda.so.1 is not the stand-in"),
    ],
)
def test_a_run_that_is_not_on_the_stand_in_ends_with_the_reason(tmp_path, change, reason):
    """Whatever takes the environment away, here a script in the place of python."""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    change = change.replace("FOLDER", str(tmp_path))
    # Any other library under that name.
    (tmp_path / "libcuda.so.1").symlink_to(GRUYERE)
    python.write_text(f'#!/bin/bash\n{change}\nexec -a "$0" {sys._base_executable} "$@"\n')
    python.chmod(0o755)
    (tmp_path / "train.py").write_text(ONE)
    ran = dryrun(tmp_path, "train.py", python=python)
    assert (ran.returncode, ran.stdout) == (2, ""), ran.stdout + ran.stderr
    assert f"the program's process does not run on the stand-in GPU: {reason}" in ran.stderr
    assert f"{python} seems to be a script" in ran.stderr
    assert "pass python itself to --python" in ran.stderr


# What a module finds when it starts, as a file; then a step. `package.model` is a relative import.
MODULE = """
import json
import os
import os
import sys

import torch

from .model import Model

json.dump(
    [
        sys.argv, sys.path[0], sys.flags.optimize, sys.stdout.write_through, sys.warnoptions,
        __name__, __package__, __file__, __spec__.name, type(__loader__).__name__,
        sys.modules["__main__"].__dict__ is globals(), sorted(globals()),
    ],
    open(os.environ["FOUND"], "w"),
)
if "ONLY_FIND" in os.environ:
    sys.exit()
model = Model(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(8, 64, device="cuda")).sum().backward()
optimizer.step()
"""


def package(folder):
    inside = folder / "package"
    inside.mkdir(parents=True)
    (inside / "__init__.py").write_text("")
    (inside / "model.py").write_text("from torch.nn import Linear as Model\n")
    (inside / "train.py").write_text(MODULE)
    (inside / "__main__.py").write_text(MODULE)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["package.train", "package"])
def test_a_module_runs_as_python_runs_it(tmp_path, name):
    package(tmp_path)
    options = ["-uO", "-W", "ignore", "-m", name]
    line = [sys.executable, *options, "--x", "1"]
    ran = dryrun(
        tmp_path, "--allow-writes=.", "--alloc", "gruyere", "--json", "--", *line, FOUND="ours"
    )
    document = told(ran)
    assert document["program"] == {
        "script": None, "module": name, "arguments": ["--x", "1"], "steps": 1, "steps_asked": 3,
        "python_options": ["-u", "-O", "-W", "ignore"], "command": f"-m {name} --x 1",
        "left_out": [],
    }  # fmt: skip
    file = "package/train.py" if name == "package.train" else "package/__main__.py"
    assert {row["line"].split(":")[0] for row in document["peak"]["lines"]} == {file}
    environment = clean_environment() | {
        "LD_PRELOAD": LIBRARIES_PRELOADED, "LD_LIBRARY_PATH": str(LIBRARIES), "FOUND": "theirs",
        "ONLY_FIND": "1",
    }  # fmt: skip
    subprocess.run(line, env=environment, cwd=tmp_path, check=True)
    ours, theirs = (json.loads((tmp_path / file).read_text()) for file in ("ours", "theirs"))
    assert ours == theirs


def test_an_installed_package_that_is_run_is_the_program(tmp_path):
    package(tmp_path / "site-packages")
    (tmp_path / "here").mkdir()
    ran = dryrun(
        tmp_path / "here", "--alloc", "torch", "--json", "-m", "package.train",
        PYTHONPATH=str(tmp_path / "site-packages"), FOUND="found",
    )  # fmt: skip
    lines = told(ran)["peak"]["lines"]
    assert {row["line"].split(":")[0] for row in lines} == {"package/train.py"}


def test_a_module_that_is_not_there_is_refused_before_anything_runs(tmp_path):
    package(tmp_path)
    ran = dryrun(tmp_path, "-m", "packages.train")
    assert ran.returncode == 2, ran.stderr
    assert f"-m packages.train: no module 'packages' in {tmp_path}" in ran.stderr
    ran = dryrun(tmp_path, "-m", "package/train.py")
    assert ran.returncode == 2 and "-m package/train.py: this is a file; write a" in ran.stderr


def test_a_module_of_a_package_that_lacks_it_fails_in_pythons_words(tmp_path):
    package(tmp_path)
    ran = dryrun(tmp_path, "-m", "package.trains")
    assert ran.returncode == 1 and "No module named package.trains" in ran.stderr


RANK = """
import os

import torch
import torch.distributed

torch.distributed.init_process_group("nccl")
model = torch.nn.Linear(64, 64).cuda(int(os.environ["LOCAL_RANK"]))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(8, 64, device="cuda")).sum().backward()
torch.distributed.all_reduce(model.weight.grad)
optimizer.step()
torch.distributed.destroy_process_group()
"""


@pytest.mark.thorough
def test_what_is_proposed_in_place_of_a_launcher_runs(tmp_path):
    (tmp_path / "train.py").write_text(RANK)
    refused = dryrun(tmp_path, "--", "torchrun", "--nproc-per-node", 1, "train.py", "--x", 1)
    assert refused.returncode == 2 and "torchrun: a launcher" in refused.stderr
    settings, found, line = refused.stderr.splitlines()[1].strip().partition("gruyere dryrun ")
    assert (found, line) == ("gruyere dryrun ", "-- train.py --x 1")
    settings = dict(word.split("=") for word in settings.split())
    ran = dryrun(tmp_path, "--alloc", "torch,gruyere", "--json", *line.split(), **settings)
    assert told(ran)["program"]["arguments"] == ["--x", "1"]


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
