"""A test that hangs fails by name, and what it waits for is ended."""

import os
import subprocess
import sys
from pathlib import Path

HANGS = """
import subprocess

def test_that_waits_for_a_program(tmp_path):
    subprocess.run(["sh", "-c", "echo $$ > pid; exec sleep 300"], cwd=tmp_path.parent.parent)

def test_that_comes_after():
    pass
"""


def test_a_test_that_hangs_fails_by_name_and_the_next_one_runs(tmp_path):
    (tmp_path / "test_hangs.py").write_text(HANGS)
    words = ["-p", "conftest", "-p", "no:cacheprovider", "--basetemp", tmp_path / "made" / "here"]
    (tmp_path / "made").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, "-c", os.devnull, tmp_path / "test_hangs.py"],
        cwd=tmp_path,
        env=os.environ
        | {"PYTHONPATH": str(Path(__file__).parent), "GRUYERE_TEST_PATIENCE": "0.002"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "1 failed, 1 passed" in done.stdout, done.stdout
    wanted = "test_that_waits_for_a_program took longer than 1.8 s, its deadline, and was ended"
    assert wanted in done.stdout, done.stdout
    pid = (tmp_path / "made" / "pid").read_text().strip()
    assert not Path(f"/proc/{pid}").exists(), "the program goes on"
