"""What Gruyère says to somebody who tries it for the first time: that it is on, what it did, and
where to look next."""

import json
import os
import pty
import re
import subprocess
import sys

import pytest

from conftest import GRUYERE
from newcomer import Newcomer

TRAIN = """
import torch
torch.backends.cudnn.enabled = False
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(4)]).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(6):
    model(torch.randn(64 * (1 + step % 3), 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def newcomer(tmp_path):
    return Newcomer(tmp_path, TRAIN)


SUMMARY = r"gruyere: peak live [\d.]+ \wiB, held [\d.]+ \wiB \(\+[\d.]+%\); [\d.]+ s in "


def test_a_script_ends_with_what_it_did_and_the_command_on_a_line_of_its_own(newcomer):
    lines = newcomer.on_a_terminal("-m", "gruyere", "train.py").splitlines()
    told = [line for line in lines if line.startswith("gruyere: peak")]
    assert len(told) == 1 and re.match(SUMMARY, told[0]), lines
    python = os.path.basename(sys.executable)
    # It is on the stand-in.
    command = f"gruyere compare --stand-in -- {python} train.py"
    behind = lines[lines.index(told[0]) + 1]
    assert behind.endswith(command) and max(map(len, (told[0], behind))) <= 80, lines


@pytest.mark.thorough
def test_the_line_is_for_terminals_and_rank_0_unless_it_is_asked_for(newcomer):
    launch = ("-m", "gruyere", "train.py")
    assert newcomer.python(*launch).stderr == ""
    assert newcomer.on_a_terminal(*launch, RANK="1", LOCAL_RANK="1") == ""
    assert newcomer.on_a_terminal("-m", "gruyere", "--summary", "off", "train.py") == ""
    asked = newcomer.python("-m", "gruyere", "--summary", "on", "train.py", RANK="1")
    assert re.match(SUMMARY, asked.stderr), asked.stderr


@pytest.mark.thorough
def test_the_line_is_of_processes_that_used_a_device_and_of_no_forked_child(newcomer):
    launch = ("-m", "gruyere", "--summary", "on", "-c")
    forks = (
        "import os, sys, torch; torch.ones(1 << 20, device='cuda'); pid = os.fork()\n"
        "if pid: os.waitpid(pid, 0)\n"
        "else: sys.exit()"
    )
    ran = newcomer.python(*launch, forks)
    assert ran.returncode == 0 and ran.stderr.count("gruyere: peak live 4.00 MiB") == 1, ran.stderr
    assert newcomer.python(*launch, "import torch; torch.ones(1)").stderr == ""


@pytest.mark.thorough
def test_the_log_says_at_the_start_what_runs_and_how(newcomer):
    launch = ("-m", "gruyere", "--limit", "90%")
    said = newcomer.python(*launch, "--door", "pluggable", "train.py", GRUYERE_LOG="info").stderr
    assert re.search(r"gruyere \d+\.\d+\.\d+, through torch's pluggable allocator", said), said
    said = newcomer.python(*launch, "train.py", GRUYERE_LOG="info").stderr
    assert re.search(r"gruyere \d+\.\d+\.\d+, through torch's allocator interface", said), said
    assert "settings: limit:90%" in said
    assert re.search(r"device 0 \(.+\): backing stitch", said), said


def test_a_line_of_code_runs_as_under_python(newcomer):
    code = (
        "import json, sys; "
        "print(json.dumps([sys.argv, sys.path[0], __name__, sorted(globals())]))"
    )
    line = ("-c", code, "--limit", "-m")
    ours, pythons = newcomer.python("-m", "gruyere", *line), newcomer.python(*line)
    assert ours.returncode == 0, ours.stderr
    assert json.loads(ours.stdout) == json.loads(pythons.stdout)
    served = "import torch, gruyere; torch.ones(1, device='cuda'); assert gruyere.is_enabled()"
    assert newcomer.python("-m", "gruyere", "-c", served).returncode == 0
    missing = newcomer.python("-m", "gruyere", "-c")
    assert missing.returncode == 2 and "no code" in missing.stderr


def test_a_program_on_standard_input_runs_as_under_python(newcomer):
    code = (
        "import json, sys\n"
        "names = {key: str(value) for key, value in globals().items()}\n"
        "print(json.dumps([sys.argv, sys.path[0], names, sys.stdin.read()]))\n"
    )
    words = ("-", "--limit", "-m")
    ours = newcomer.python("-m", "gruyere", *words, stdin=code)
    pythons = newcomer.python(*words, stdin=code)
    assert ours.returncode == 0, ours.stderr
    assert json.loads(ours.stdout) == json.loads(pythons.stdout)
    failing = "import torch\nraise KeyError('mine')\n"
    ours = newcomer.python("-m", "gruyere", "-", stdin=failing)
    pythons = newcomer.python("-", stdin=failing)
    assert ours.returncode == pythons.returncode == 1 and ours.stderr == pythons.stderr


def test_a_terminal_is_no_program(newcomer):
    ours, theirs = pty.openpty()
    ran = subprocess.run(
        [sys.executable, "-m", "gruyere", "-"],
        env=newcomer.environment(),
        cwd=newcomer.folder,
        stdin=theirs,
        capture_output=True,
        text=True,
        timeout=60,
    )
    os.close(ours)
    os.close(theirs)
    assert ran.returncode == 2, ran.stderr
    assert "gruyere: -: reads a program from standard input, which is a terminal" in ran.stderr
    assert "`- < script.py`" in ran.stderr and "Traceback" not in ran.stderr


def test_a_notebooks_cell_may_run_again(newcomer):
    cell = "import gruyere; gruyere.enable(limit='90%'); "
    again = newcomer.python("-c", cell + cell)
    assert (again.returncode, again.stderr) == (0, "")
    other = newcomer.python("-c", cell + cell.replace("90%", "80%"))
    assert other.returncode == 1 and "called before" in other.stderr and "limit:80%" in other.stderr


def test_compare_prints_the_table_that_people_post(newcomer):
    done = newcomer.command("compare", "--stand-in", "--", sys.executable, "train.py")
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert [row.count("|") for row in rows] == [7] * 5, done.stdout
    for row, name in zip(rows[2:], ["torch default", "torch expandable", "**Gruyère**"]):
        assert name in row and "iB" in row, done.stdout
    verdict, program = done.stdout.split("\n\n")[:2]
    assert "holds least" in verdict or "holds as little as" in verdict, done.stdout
    assert program.startswith("`train.py` on ") and "stand-in" in program
    assert "gruyere compare: train.py, gruyere" in done.stderr, "progress, also in a file"


@pytest.mark.thorough
def test_compare_runs_a_module_with_options_of_python(newcomer):
    package = newcomer.folder / "package"
    package.mkdir()
    (package / "shape.py").write_text("import sys\nassert sys.flags.optimize == 1\nWIDTH = 64\n")
    code = "from .shape import WIDTH\n" + TRAIN.replace("1024", "WIDTH")
    (package / "train.py").write_text(code)
    line = [sys.executable, "-uO", "-m", "package.train", "--x"]
    done = newcomer.command("compare", "--stand-in", "--json", "all.json", "--", *line)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n\n")[1].startswith("`-m package.train --x` on ")
    document = json.loads((newcomer.folder / "all.json").read_text())
    (program,) = document["programs"]
    named = {key: program[key] for key in ("program", "module", "arguments")}
    assert named == {"program": "package.train", "module": True, "arguments": ["--x"]}
    assert [row["outcome"] for row in program["rows"]] == ["completed"] * 3
    done = newcomer.command("compare", "--stand-in", "--", "moe")
    assert done.returncode == 2, "a script, and no built-in program"
    assert done.stderr == "gruyere compare: ./moe: no such file; give the path as for python\n"
    done = newcomer.command("compare", "--stand-in", "--", "-m", "packages.train")
    assert done.returncode == 2 and "-m packages.train: no module" in done.stderr


def test_run_points_a_python_program_to_the_package(newcomer):
    done = newcomer.command("run", "--library", GRUYERE, "--", sys.executable, "-c", "pass")
    assert done.returncode == 0, done.stderr
    assert "PyTorch keeps its own cache" in done.stderr
    assert "-m gruyere -c pass" in done.stderr


HOLDS = """
import subprocess, sys, torch, gruyere
kept = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
gruyere.step()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.thorough
def test_no_pid_is_asked_for_where_there_is_one_process(newcomer):
    (newcomer.folder / "holds.py").write_text(HOLDS)
    held = []

    def start():
        process = subprocess.Popen(
            [sys.executable, "-m", "gruyere", "holds.py", "--lr", "3"],
            env=newcomer.environment(GRUYERE_CONF="name:first"),
            cwd=newcomer.folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        held.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    nobody = newcomer.command("stat")
    assert nobody.returncode == 1 and "no process uses gruyere" in nobody.stderr
    try:
        one = start()
        assert str(one.pid) in newcomer.command("stat").stdout
        for words in (["map"], ["post"], ["snapshot", "--json", "-o", "-"], ["address", "0x1000"]):
            done = newcomer.command(*words)
            assert done.returncode == 0, (words, done.stderr)
        screen = newcomer.command("top", "--once", COLUMNS="160", LINES="40").stdout
        assert "holds.py --lr 3" in screen and "-m gruyere" not in screen, screen
        exported = newcomer.command("export", "--print").stdout
        assert 'script="holds"' in exported and 'run="first"' in exported
        two = start()
        several = newcomer.command("stat")
        assert several.returncode == 1
        assert str(one.pid) in several.stderr and str(two.pid) in several.stderr, several.stderr
    finally:
        for process in held:
            process.communicate()
