"""Programs that fail, hang, swallow exceptions or can't run at all under `gruyere dryrun`: it gives
the reason, and leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import COMMAND, ROOT
from dry_runs import TRAIN, dry, dryrun, row, told
from gruyere._bench.runners import blame


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


# Threads in calls of C++ that need the GIL at their end: an interpreter that shuts down meanwhile
# aborts. What it prints at the end is not flushed by itself.
DAEMONS = """
import atexit
import threading
import torch


def work():
    data = torch.zeros(1 << 16)
    while True:
        data + 1


for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
atexit.register(print, "its exit handler")
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
try:
    while True:
        model(torch.empty(8, 64, device="cuda")).sum().backward()
        optimizer.step()
finally:
    print("its end", end=" and ")
"""


@pytest.mark.parametrize(
    "words, code",
    [
        (["-m", "gruyere", "--stand-in", "--steps", "3", "train.py"], 0),
        (["-m", "gruyere", "--stand-in", "--steps", "3", "other.py"], 1),
    ],
)
def test_a_program_with_daemon_threads_ends_on_the_stand_in_as_any(tmp_path, words, code):
    (tmp_path / "train.py").write_text(DAEMONS)
    (tmp_path / "other.py").write_text(f"{DAEMONS}    raise ValueError\n")
    ran = subprocess.run(
        [sys.executable, *words], env=dry()[1] | {"PYTHONPATH": str(ROOT / "python_loader")},
        cwd=tmp_path, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert ran.returncode == code, ran.stdout + ran.stderr
    assert ran.stdout == "its end and its exit handler\n"
    # The library's exit handler ran.
    assert "gruyere: peak live" in ran.stderr and "Fatal Python error" not in ran.stderr


def test_a_program_with_daemon_threads_has_an_answer(tmp_path):
    (tmp_path / "train.py").write_text(DAEMONS)
    found = told(dryrun(tmp_path, "--alloc", "torch", "--json", "train.py"))
    assert found["program"]["steps"] == 3 and found["trust"]["reasons"] == []
    # The stand-in wrote its books.
    assert found["trust"]["host_reads"] is not None


def test_a_program_with_daemon_threads_is_compared(tmp_path):
    (tmp_path / "train.py").write_text(DAEMONS)
    line = [COMMAND, "compare", "--stand-in", "--", sys.executable, "train.py"]
    ran = subprocess.run(
        list(map(str, line)), env=dry()[1], cwd=tmp_path, capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "failed" not in ran.stdout


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
    assert said[-1].startswith("gruyere dryrun: the program failed while it was analysed, under "
        "torch on h100-80: Key")


def test_a_traceback_has_no_frames_of_the_functions_that_a_dry_run_wraps(tmp_path):
    code = """
import torch
def joined():
    return torch.cat([torch.ones(2, 3, device="cuda"), torch.ones(4, 5, device="cuda")])
class Layer(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return joined()
try:
    Layer.apply(torch.ones(2, device="cuda"))
except RuntimeError as error:
    raise KeyError("mine") from error
"""
    (tmp_path / "train.py").write_text(code)
    ran = dryrun(tmp_path, "train.py")
    assert ran.returncode == 1 and "in joined" in ran.stderr, ran.stderr
    traced = [line for line in ran.stderr.splitlines() if line.startswith('  File "')]
    assert [line for line in traced if "/gruyere/" in line] == [], ran.stderr


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


# It looks for the largest batch that fits, from a small one on.
SEARCHES = """
import torch

model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
size = 1
while True:
    try:
        model(torch.empty(size, 64, device="cuda")).sum().backward()
        optimizer.step()
    except torch.OutOfMemoryError:
        break
    size *= 2
"""


def test_a_program_that_handles_out_of_memory_and_met_none_is_said_to_need_more_later(tmp_path):
    (tmp_path / "train.py").write_text(SEARCHES)
    ran = dryrun(tmp_path, "--alloc", "torch", "train.py")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    said = " ".join(ran.stdout.split())
    assert "But it handles out-of-memory errors at train.py:11, and met none: if it looks" in said


# Where there is room for the first try, it needs other memory.
TRIES = """
import torch

kept = [torch.zeros(128 << 20, dtype=torch.uint8, device="cuda")]
try:
    kept.append(torch.zeros(4 << 30, dtype=torch.uint8, device="cuda"))
except torch.OutOfMemoryError:
    kept.append(torch.zeros(64 << 20, dtype=torch.uint8, device="cuda"))
    kept.append(torch.zeros(2 << 30, dtype=torch.uint8, device="cuda"))
"""


def test_a_program_that_runs_out_of_memory_again_is_told_how_often_and_where_its_peak_is(tmp_path):
    (tmp_path / "train.py").write_text(TRIES)
    ran = dryrun(tmp_path, "--alloc", "torch", "--gb", "1", "train.py")
    assert ran.returncode == 3, ran.stdout + ran.stderr
    said = " ".join(ran.stdout.split())
    where = "it runs out of memory 2 times, with 192 MiB live at train.py:8."
    assert f"It does not fit on 1gb: {where}" in said
    assert "Live at the peak until it ran out of memory: 192 MiB" in said
