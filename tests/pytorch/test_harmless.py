"""`gruyere dryrun` and `gruyere compare` change nothing of the user's, as the user runs them: in a
folder with files of the program's own, in each way that the kernel can keep it."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import COMMAND, Phantom
from dry_runs import dry, told
from test_sandbox import HERE, WAYS

# An ordinary script: resumes from its checkpoint, trains, saves at the end or when it is stopped.
TRAIN = """
import glob, os, shutil, torch

model = torch.nn.Linear(512, 512).cuda()
optimizer = torch.optim.AdamW(model.parameters())
saved = torch.load("model.pt", map_location="cuda", weights_only=True)
model.load_state_dict(saved["model"])
assert saved["step"] == 123468, saved["step"]
step = saved["step"]
shutil.rmtree("runs")
os.mkdir("runs")
try:
    for step in range(step + 1, step + 1000):
        model(torch.randn(64, 512, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.save(model.state_dict(), f"runs/{step}.pt")
        for old in sorted(glob.glob("runs/*.pt"))[:-2]:
            os.remove(old)
finally:
    torch.save({"model": model.state_dict(), "step": step}, "model.pt")
    with open("log.txt", "a") as file:
        file.write(f"step {step}\\n")
"""
# The checkpoint, as the same script would have left it: made on the host, without CUDA.
CHECKPOINT = """
import sys, torch
model = torch.nn.Linear(512, 512)
torch.save({"model": model.state_dict(), "step": 123468}, sys.argv[1])
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    phantom = Phantom(tmp_path_factory.mktemp("phantom"))
    folder = tmp_path_factory.mktemp("harmless")
    (folder / "train.py").write_text(TRAIN)
    assert phantom.run(None, folder / "model.pt", code=CHECKPOINT).code == 0
    (folder / "log.txt").write_text("step 123468\n")
    (folder / "runs").mkdir()
    (folder / "runs" / "123468.pt").write_bytes(b"old")
    assert (folder / "model.pt").stat().st_size > 1 << 20
    return folder


@pytest.fixture(params=WAYS)
def way(request):
    return request.param


@pytest.fixture
def folder(made, tmp_path):
    return Path(shutil.copytree(made, tmp_path / "as it is"))


def sums(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def run(way, folder, line, environment, **more):
    """A command for which the kernel keeps files in this way only."""
    return subprocess.run(
        [sys.executable, HERE / "without_calls.py", WAYS.get(way, way), *line], cwd=folder,
        env=environment | more, capture_output=True, text=True, timeout=600,
    )  # fmt: skip


def dryrun(way, folder, *arguments, **more):
    return run(way, folder, *dry("--gb", 2, "--alloc", "torch", *arguments), **more)


def test_a_dry_run_leaves_checkpoints_logs_and_folders_as_they_were(way, folder):
    before = sums(folder)
    ran = dryrun(way, folder, "--json", "train.py")
    document = told(ran)
    assert sums(folder) == before
    assert document["sandbox"]["way"] == way
    # Each of them found the checkpoint as it is.
    assert document["sandbox"]["runs"] == 3 and document["program"]["steps"] == 3
    assert "cannot change your files" in ran.stderr.splitlines()[0]


def test_the_first_line_of_the_answer_says_what_ran(folder):
    ran = dryrun("overlay", folder, "train.py")
    assert ran.returncode == 0, ran.stderr
    first, second = ran.stdout.splitlines()[:2]
    assert first == "train.py: 3 runs of 3 steps; your files are unchanged."
    assert second.startswith("It fits these 3 steps on")


@pytest.mark.thorough
def test_what_the_user_allows_is_written(way, folder):
    ran = dryrun(way, folder, "--allow-writes=log.txt", "train.py")
    assert ran.returncode == 0, ran.stderr
    assert (folder / "log.txt").read_text() == "step 123468\n" + 3 * "step 123471\n"
    assert sums(folder)["runs/123468.pt"] == hashlib.sha256(b"old").hexdigest()


def test_what_is_refused_ends_with_4_and_its_name(folder, tmp_path):
    beside = tmp_path / "beside.bin"
    beside.write_bytes(b"kept")
    (folder / "away.py").write_text(
        f"import torch\ntorch.zeros(1).cuda()\nopen({str(beside)!r}, 'wb')\n"
    )
    ran = dryrun("landlock", folder, "away.py")
    assert ran.returncode == 4, ran.stderr
    assert f"--allow-writes={beside}" in ran.stderr and beside.read_bytes() == b"kept"
    assert "Traceback" in ran.stderr


def test_a_host_that_can_t_be_reached_ends_with_4_and_its_name(way, folder):
    (folder / "away.py").write_text(
        "import torch, urllib.request\ntorch.zeros(1).cuda()\n"
        "urllib.request.urlopen('http://weights.example/model')\n"
    )
    ran = dryrun(way, folder, "away.py")
    assert ran.returncode == 4, ran.stderr
    assert "weights.example" in ran.stderr and "--allow-network" in ran.stderr


def test_a_program_that_fails_by_itself_is_not_the_sandbox_s_fault(way, folder):
    (folder / "wrong.py").write_text(
        "import torch\ntorch.zeros(1).cuda()\n"
        "try:\n    open('/proc/sys/kernel/hostname', 'w')\nexcept OSError:\n    pass\n"
        "raise ValueError('a bug')\n"
    )
    ran = dryrun(way, folder, "wrong.py")
    assert ran.returncode == 1 and "ValueError: a bug" in ran.stderr
    assert "--allow" not in ran.stderr


def test_too_much_on_the_disk_ends_with_4(way, folder):
    (folder / "large.py").write_text(
        "import os, time, torch\ntorch.zeros(1).cuda()\n"
        "for number in range(40):\n    open(f'{number}.bin', 'wb').write(os.urandom(1 << 20))\n"
        "time.sleep(60)\n"
    )
    ran = dryrun(way, folder, "--scratch", "16MiB", "large.py")
    assert ran.returncode == 4, ran.stderr
    assert "16 MiB" in ran.stderr and "--scratch" in ran.stderr


@pytest.mark.thorough
def test_reporters_are_told_that_they_are_offline(folder):
    (folder / "reports.py").write_text(
        "import os, torch\ntorch.zeros(1).cuda()\n"
        "assert os.environ['WANDB_MODE'] == os.environ['NEPTUNE_MODE'] == 'offline'\n"
        "assert os.environ['MLFLOW_TRACKING_URI'].startswith('file:')\n"
    )
    ran = dryrun("overlay", folder, "reports.py", MLFLOW_TRACKING_URI="https://mlflow.example")
    assert ran.returncode == 0, ran.stderr


@pytest.mark.thorough
def test_cold_and_warm_caches_answer_alike(folder, tmp_path):
    # A compiler that measures its kernels when it has none of them in its cache.
    (folder / "compiles.py").write_text(
        "import os, torch\n"
        "cache = os.path.join(os.environ['TRITON_CACHE_DIR'], 'kernel')\n"
        "if not os.path.exists(cache):\n"
        "    tried = torch.empty(512 << 20, dtype=torch.uint8, device='cuda')\n"
        "    del tried\n"
        "    os.makedirs(os.path.dirname(cache), exist_ok=True)\n"
        "    open(cache, 'w').close()\n"
        "kept = torch.empty(8 << 20, dtype=torch.uint8, device='cuda')\n"
    )
    warm = tmp_path / "warm"
    warm.mkdir()
    (warm / "kernel").touch()
    for cache in (warm, tmp_path / "cold"):
        ran = dryrun("overlay", folder, "--json", "compiles.py", TRITON_CACHE_DIR=str(cache))
        document = told(ran)
        assert document["peak"]["bytes"] == 8 << 20
        assert document["sandbox"]["runs"] == 4
    assert not (tmp_path / "cold").exists()


def test_where_nothing_keeps_files_no_program_runs(folder):
    before = sums(folder)
    ran = dryrun("unshare,landlock_create_ruleset", folder, "train.py")
    assert ran.returncode == 2 and "--allow-writes" in ran.stderr, ran.stderr
    assert sums(folder) == before


@pytest.mark.thorough
def test_compare_leaves_files_as_they_were_and_its_rows_are_of_one_program(way, folder):
    before = sums(folder)
    _, environment = dry()
    line = [COMMAND, "compare", "--stand-in", "--json=-", "--", sys.executable, "train.py"]
    ran = run(way, folder, [str(word) for word in line], environment)
    assert ran.returncode == 0, ran.stderr
    assert sums(folder) == before
    rows = json.loads(ran.stdout)["programs"][0]["rows"]
    assert [(row["outcome"], row["steps"]) for row in rows] == 3 * [("completed", 12)]
    # The same work: torch counts the same.
    assert len({row["requested_peak"] for row in rows}) == 1


@pytest.mark.thorough
def test_compare_goes_on_to_the_end_where_that_is_asked_for(folder):
    (folder / "short.py").write_text(TRAIN.replace("1000", "21"))
    _, environment = dry()
    line = [COMMAND, "compare", "--stand-in", "--json=-", "--steps", "all", "--"]
    ran = run("overlay", folder, [str(w) for w in (*line, sys.executable, "short.py")], environment)
    assert ran.returncode == 0, ran.stderr
    rows = json.loads(ran.stdout)["programs"][0]["rows"]
    assert [row["steps"] for row in rows] == [20, 20, 20]
