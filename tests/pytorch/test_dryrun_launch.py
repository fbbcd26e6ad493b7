"""Modules, packages, ranks, workers of loaders, programs with a port: a dry run runs each as Python
does."""

import json
import socket
import subprocess
import sys

import pytest

from conftest import GRUYERE, LIBRARIES, LIBRARIES_PRELOADED, PHANTOM, clean_environment
from dry_runs import TRAIN, dryrun, told


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
        "left_out": [], "ranks": None,
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
    options = ("--alloc", "torch,gruyere", "--json")
    launch = ("torchrun", "--nproc-per-node", 1, "train.py", "--x", 1)
    refused = dryrun(tmp_path, *options, *launch)
    assert refused.returncode == 2 and "torchrun: a launcher" in refused.stderr
    settings, found, line = refused.stderr.splitlines()[1].strip().partition("gruyere dryrun ")
    # `dryrun` names the Python.
    python, _, line = line.partition(f"{sys.executable} ")
    assert (found, python) == ("gruyere dryrun ", "--python "), refused.stderr
    assert line == f"{' '.join(options)} -- train.py --x 1"
    settings = dict(word.split("=") for word in settings.split())
    ran = dryrun(tmp_path, *line.split(), **settings)
    assert told(ran)["program"]["arguments"] == ["--x", "1"]


# Parameters gathered on a stream of their own, which torch keeps with record_stream.
SHARDED = """
import torch
from torch import distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

distributed.init_process_group("nccl")
model = nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024)) for _ in range(8)]).cuda()
model = FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
optimizer = torch.optim.AdamW(model.parameters())
while True:
    model(torch.randn(256, 1024).cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_what_other_streams_still_use_makes_no_difference_between_rows(tmp_path):
    (tmp_path / "train.py").write_text(SHARDED)
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0"}  # fmt: skip
    rows = told(dryrun(tmp_path, "--json", "train.py", **rank))["gpus"][0]["runs"]
    assert len({row["peak_live"] for row in rows}) == 1
    # Else the program shows nothing.
    assert len({row["peak_requested"] for row in rows}) > 1
