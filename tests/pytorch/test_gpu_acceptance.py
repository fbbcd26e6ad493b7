"""The acceptance program for a real GPU (tests/gpu) in its book-keeping parts, on the phantom."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import GRUYERE, PHANTOM, ROOT, TARGET, clean_environment

GPU = ROOT / "tests" / "gpu"
sys.path.insert(0, str(GPU))
MEMCHECK = "canaries under compute-sanitizer's memcheck"


def accepting(folder, *arguments, **settings):
    """The program and how it is started."""
    environment = clean_environment() | {
        "LD_PRELOAD": str(PHANTOM),
        "LD_LIBRARY_PATH": str(TARGET / "phantom-libs"),
        "PHANTOM_BOOKS": str(folder / "books-%p"),
        "GRUYERE_LIBRARY": str(GRUYERE),
        "OMP_NUM_THREADS": "1",
    }
    return {
        "args": [sys.executable, GPU / "acceptance.py", *arguments],
        "env": environment | settings,
        "cwd": folder,
    }


def accept(folder, *arguments, **settings):
    return subprocess.run(
        **accepting(folder, *arguments, **settings), capture_output=True, text=True, timeout=1800
    )


def document_of(folder):
    return json.loads((folder / "gpu-acceptance.json").read_text())


def is_running(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """All parts, in a hurry."""
    folder = tmp_path_factory.mktemp("whole")
    ran = accept(folder, "--quick")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return folder


@pytest.fixture
def hanging(tmp_path):
    """Settings with which graphs.py says a word and hangs, before it is even begun; its process is
    in the file `hanging` then."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys, time\n"
        "if any(word.endswith('graphs.py') for word in sys.orig_argv):\n"
        "    print('said before it hung', file=sys.stderr, flush=True)\n"
        "    open('hanging.new', 'w').write(str(os.getpid()))\n"
        "    os.rename('hanging.new', 'hanging')\n"
        "    time.sleep(600)\n"
    )
    return {"PYTHONPATH": str(tmp_path)}


def test_acceptance_keeps_its_books_on_the_phantom(whole):
    document = document_of(whole)
    assert document["machine"]["kernels_run"] is False
    assert {row["part"] for row in document["rows"]} == set("abcd")
    # Nothing is claimed that only kernels can show.
    assert {row["verdict"] for row in document["rows"] if row["what"] != MEMCHECK} == {"books only"}
    for file in whole.glob("books-*"):
        assert json.loads(file.read_text())["misuse"] == []


def test_parts_run_in_the_order_of_what_they_decide(whole):
    parts = [row["part"] for row in document_of(whole)["rows"]]
    assert "".join(dict.fromkeys(parts)) == "bacd"


def test_canaries_run_without_destroyed_streams_and_with(whole):
    details = document_of(whole)["details"]
    assert details["canaries"]["moves"]["streams_destroyed"] == 0
    assert details["canaries"]["moves"]["create_stream"] > 0
    assert details["canaries_destroyed"]["moves"]["streams_destroyed"] > 0


def test_every_process_has_a_file_of_what_it_said(whole):
    processes = document_of(whole)["processes"]
    files = [process["stderr"] for process in processes]
    assert sorted(files) == sorted(
        str(file.relative_to(whole)) for file in whole.glob("gpu-acceptance.stderr/*.txt")
    )
    assert {process["ended"] for process in processes} == {"exit code 0"}
    assert "gpu-acceptance.stderr/01-facts-native.txt" in files


@pytest.mark.thorough
@pytest.mark.parametrize("capturing_ids", ["refused", "invalidate"])
def test_graphs_hold_where_a_driver_tells_no_id_of_a_capturing_stream(tmp_path, capturing_ids):
    """Whoever asks for the id of a stream in a capture gets 900, and the capture is lost."""
    ran = accept(tmp_path, "--quick", "--only", "c", PHANTOM_CAPTURING_IDS=capturing_ids)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (row,) = document_of(tmp_path)["rows"]
    assert (row["part"], row["verdict"]) == ("c", "books only")


def test_acceptance_says_what_failed_and_keeps_all_of_stderr(tmp_path):
    """A device on which nothing fits: the part fails, is named, and the exit says so."""
    ran = accept(tmp_path, "--quick", "--only", "d", PHANTOM_MEMORY="64MiB")
    assert ran.returncode == 1, ran.stdout + ran.stderr
    document = document_of(tmp_path)
    (row,) = document["rows"]
    assert (row["part"], row["verdict"]) == ("d", "FAILED")
    assert "FAILED" in ran.stdout
    process = document["processes"][-1]
    assert (process["program"], process["ended"]) == ("out_of_memory", "exit code 1")
    assert process["stderr"] in row["result"]
    said = (tmp_path / process["stderr"]).read_text()
    # The whole of it: from where the error came, to the line that the table has.
    assert "Traceback" in said and said.strip().splitlines()[-1] in row["result"]


def test_a_part_that_hangs_ends_at_its_limit_and_what_it_said_is_kept(tmp_path, hanging):
    ran = accept(tmp_path, "--quick", "--only", "c", "--limit", "2", **hanging)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    document = document_of(tmp_path)
    (row,) = document["rows"]
    assert (row["part"], row["verdict"]) == ("c", "FAILED")
    assert row["result"].startswith("took more than 2 s: said before it hung")
    assert (tmp_path / document["processes"][-1]["stderr"]).read_text() == "said before it hung\n"
    assert not is_running(int((tmp_path / "hanging").read_text()))


def test_one_that_is_told_to_end_takes_its_part_along(tmp_path, hanging):
    running = subprocess.Popen(
        **accepting(tmp_path, "--only", "c", **hanging),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while (
        not (tmp_path / "hanging").exists()
        and running.poll() is None
        and time.monotonic() < deadline
    ):
        time.sleep(0.1)
    running.terminate()
    assert running.wait(timeout=60) == 128 + signal.SIGTERM
    assert not is_running(int((tmp_path / "hanging").read_text()))


def test_the_parts_limits_fit_into_those_of_the_session():
    """Otherwise the session would kill a part that hangs before the acceptance program can say
    which."""
    from acceptance import FACTS_LIMIT, PARTS

    session = (GPU / "bundle" / "session.sh").read_text()
    limits = dict(re.findall(r"\[(torch-\w+)\]=(\d+)", session))
    letters = dict(re.findall(r"(torch-\w+)\) acceptance (\w+) ;;", session))
    assert sorted("".join(letters.values())) == sorted(PARTS)
    for name, parts in letters.items():
        assert FACTS_LIMIT + sum(PARTS[part].limit for part in parts) <= int(limits[name]), name


def test_the_readme_has_the_parts_in_their_order_with_their_limits():
    from acceptance import PARTS

    rows = re.findall(r"^\| ([a-z]) \| (\d+) \|", (GPU / "README.md").read_text(), re.MULTILINE)
    assert rows == [(letter, str(part.limit)) for letter, part in PARTS.items()]


@pytest.mark.thorough
def test_the_parts_with_torch_run_in_the_bundle(tmp_path):
    """From a folder that has nothing of the repository beside it."""
    build = ["cargo", "xtask", "gpu-bundle", "--out", tmp_path]
    subprocess.run(build, cwd=ROOT, env=os.environ | {"CARGO_TARGET_DIR": str(TARGET)}, check=True)
    environment = clean_environment() | {
        "LD_PRELOAD": str(PHANTOM),
        "LD_LIBRARY_PATH": str(TARGET / "phantom-libs"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "GRUYERE_BENCH_TORCH": "--stand-in",
        "GRUYERE_PHANTOM": str(PHANTOM),
    }
    folder = tmp_path / "gruyere-gpu"
    ran = subprocess.run(
        ["./session.sh", "--quick", "torch-graphs", "torch-bench"],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
    )
    summary = json.loads((folder / "results" / "summary.json").read_text())
    parts = {part["name"]: part for part in summary["parts"]}
    graphs, bench = parts["torch-graphs"], parts["torch-bench"]
    assert graphs["outcome"] == bench["outcome"] == "passed", ran.stdout + ran.stderr
    assert [row["part"] for row in graphs["document"]["rows"]] == ["a", "a", "c", "d"]
    assert {program["program"] for program in bench["document"]["programs"]} == {"moe", "offload"}


# What compute-sanitizer does with its command line: options with a value each, then the program.
SANITIZER = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do
    case $1 in --error-exitcode) code=$2 ;; --log-file) log=$2 ;; esac
    shift 2
done
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("does", "verdict", "result"),
    [
        ('"$@" && echo "========= ERROR SUMMARY: 0 errors" >"$log"', "books only", "no error"),
        (
            '"$@" && echo "========= ERROR SUMMARY: 2 errors" >"$log" && exit "$code"',
            "FAILED",
            "exit code 86",
        ),
        (
            'echo "========= Error: no such device" >&2; exit 1',
            "skipped",
            "the tool gave no verdict: exit code 1: ========= Error: no such device",
        ),
    ],
    ids=["finds nothing", "finds errors", "cannot work here"],
)
def test_compute_sanitizer_has_its_say_where_it_is_installed(tmp_path, does, verdict, result):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(SANITIZER + does + "\n")
    tool.chmod(0o755)
    ran = accept(tmp_path, "--quick", "--only", "b", PATH=f"{tmp_path}:{os.environ['PATH']}")
    rows = {row["what"]: row for row in document_of(tmp_path)["rows"]}
    row = rows.pop(MEMCHECK)
    assert row["verdict"] == verdict and row["result"].startswith(result), row
    # The tool's own affair.
    assert {other["verdict"] for other in rows.values()} == {"books only"}
    assert ran.returncode == (verdict == "FAILED"), ran.stdout + ran.stderr


def test_acceptance_names_a_wrong_part(tmp_path):
    ran = accept(tmp_path, "--only", "az")
    assert ran.returncode == 2
    assert "there is no part z" in ran.stderr
