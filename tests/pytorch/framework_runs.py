"""Runs a script of frameworks/ on the phantom, under torch's own allocator or with Gruyère in its
launch line."""

import json
import subprocess
from dataclasses import dataclass

import pytest

import door
from conftest import GRUYERE, HERE, PHANTOM, ROOT, TARGET, clean_environment

PYTHON = ROOT / ".venv-frameworks" / "bin" / "python"

# The launch lines: what stands between python and the script, and what is set in the environment.
PLAIN = ([], {})
MODULE = (["-m", "gruyere"], {})
VARIABLE = ([], {"GRUYERE_ENABLE": "1"})
# The console scripts as pip has installed them. (torch is in the environment below, so its script
# is given our interpreter.)
ACCELERATE_SCRIPT = [PYTHON.parent / "accelerate", "launch"]
TORCHRUN_SCRIPT = [ROOT / ".venv-torch" / "bin" / "torchrun"]
ACCELERATE = [
    *ACCELERATE_SCRIPT,
    "--num_processes",
    "1",
    "--num_machines",
    "1",
    "--mixed_precision",
    "bf16",
]
ACCELERATE_PLAIN = (ACCELERATE, {})
ACCELERATE_MODULE = ([*ACCELERATE, "-m", "gruyere"], {})
# Two ranks.
TORCHRUN = ["--standalone", "--nproc-per-node=2"]
ACCELERATE_RANKS = [
    *ACCELERATE_SCRIPT,
    "--multi_gpu",
    "--num_processes",
    "2",
    "--num_machines",
    "1",
    "--mixed_precision",
    "no",
    "--main_process_port",
    "0",
]
LAUNCHERS = {
    "torchrun -m gruyere": ([*TORCHRUN_SCRIPT, *TORCHRUN, "-m", "gruyere"], {}),
    "GRUYERE_ENABLE=1 torchrun": ([*TORCHRUN_SCRIPT, *TORCHRUN], {"GRUYERE_ENABLE": "1"}),
    "python -m gruyere -m torch.distributed.run": (
        ["-m", "gruyere", "-m", "torch.distributed.run", *TORCHRUN],
        {},
    ),
    "accelerate launch -m gruyere": ([*ACCELERATE_RANKS, "-m", "gruyere"], {}),
    "GRUYERE_ENABLE=1 accelerate launch": (ACCELERATE_RANKS, {"GRUYERE_ENABLE": "1"}),
    "python -m gruyere -m accelerate.commands.launch": (
        ["-m", "gruyere", "-m", "accelerate.commands.launch", *ACCELERATE_RANKS[2:]],
        {},
    ),
}


@dataclass
class Ran:
    """What a script printed on its last line, and what each of its processes reported at its end
    (site/sitecustomize.py)."""

    out: str
    err: str
    answer: dict
    processes: list
    books: list

    @property
    def devices(self):
        return [device for process in self.processes for device in process["devices"]]

    @property
    def live_peak(self):
        return max(device["live_peak"] for device in self.devices)


# The doors by which torch comes to Gruyère.
DOORS = ("pluggable", "native")


def run(
    folder, script, *arguments, launch, through, processes=1, timeout=240, answers=True, **settings
):
    """Runs frameworks/SCRIPT.py as it stands, `through` a door or with torch's own allocator
    ("torch"), checks its exit and its books, and hands back what it (where it `answers`) and its
    processes said."""
    reports = folder / through
    reports.mkdir()
    options, variables = launch
    environment = clean_environment() | {
        "LD_PRELOAD": str(PHANTOM),
        "LD_LIBRARY_PATH": str(TARGET / "phantom-libs"),
        "PHANTOM_BOOKS": str(reports / "books-%p"),
        "PYTHONPATH": str(HERE / "site"),
        "GRUYERE_TEST_REPORTS": str(reports),
        "GRUYERE_TEST_LIBRARY": str(GRUYERE),
        "GRUYERE_TEST_PHANTOM": str(PHANTOM),
        "GRUYERE_LIBRARY": str(GRUYERE),
        "XDG_CACHE_HOME": str(door.CACHE),
        "HF_HUB_OFFLINE": "1",
        # Many small processes on few cores.
        "OMP_NUM_THREADS": "1",
    }
    if through != "torch":
        environment["GRUYERE_CONF"] = f"door:{through}"
    environment |= variables | {key: str(value) for key, value in settings.items()}
    command = [PYTHON, *options, HERE / "frameworks" / f"{script}.py", *arguments]
    try:
        ended = subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"{script} took more than {timeout} s\n{error.stdout}\n{error.stderr}")
    assert ended.returncode == 0, f"exit code {ended.returncode}\n{ended.stdout}\n{ended.stderr}"
    found = [json.loads(file.read_text()) for file in reports.glob("*.json")]
    books = [json.loads(file.read_text()) for file in reports.glob("books-*")]
    answer = json.loads(ended.stdout.strip().splitlines()[-1]) if answers else {}
    ran = Ran(ended.stdout, ended.stderr, answer, found, books)
    assert len(found) == processes, (found, ended.stderr)
    check(ran, through)
    return ran


def check(ran, through):
    """Who allocated is who should have; every byte is accounted for; no rule of the driver's was
    broken."""
    for device in ran.devices:
        # torch calls its own "native".
        assert device["allocator"] == ("native" if through == "torch" else f"gruyere, {through}")
        assert device["reserved"] == device["physical"], device
        assert device["live"] <= device["live_peak"] <= device["physical_peak"], device
        if through != "torch":
            assert (device["stats"], device["validate"], device["bad_frees"]) == (0, 0, 0), device
            for name in ("live", "live_peak", "reserved"):
                assert device[f"torch_{name}"] == device[name], device
    assert ran.books
    for books in ran.books:
        assert books["misuse"] == []
    assert "not simulated" not in ran.err, ran.err
    for word in ("panicked", "does not yet support", "CUDAPluggableAllocator"):
        assert word not in ran.err, ran.err
