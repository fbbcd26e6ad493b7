"""The acceptance program for a real GPU (tests/gpu) in its book-keeping parts, on the phantom."""

import json
import subprocess
import sys

import pytest

from conftest import GRUYERE, PHANTOM, ROOT, TARGET, clean_environment


def accept(folder, *arguments, **settings):
    environment = clean_environment() | {
        "LD_PRELOAD": str(PHANTOM),
        "LD_LIBRARY_PATH": str(TARGET / "phantom-libs"),
        "PHANTOM_BOOKS": str(folder / "books-%p"),
        "GRUYERE_LIBRARY": str(GRUYERE),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, ROOT / "tests" / "gpu" / "acceptance.py", *arguments]
    return subprocess.run(command, env=environment | settings, cwd=folder, capture_output=True, text=True, timeout=1800)


def test_acceptance_keeps_its_books_on_the_phantom(tmp_path):
    ran = accept(tmp_path, "--quick")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    document = json.loads((tmp_path / "gpu-acceptance.json").read_text())
    assert document["machine"]["kernels_run"] is False
    assert {row["part"] for row in document["rows"]} == set("abcdef")
    # Nothing is claimed that only kernels can show.
    assert {row["verdict"] for row in document["rows"]} == {"books only"}
    assert set(document["details"]["programs"]) == {"pretrain", "varied", "generate"}
    for file in tmp_path.glob("books-*"):
        assert json.loads(file.read_text())["misuse"] == []


@pytest.mark.parametrize("capturing_ids", ["refused", "invalidate"])
def test_graphs_hold_where_a_driver_tells_no_id_of_a_capturing_stream(tmp_path, capturing_ids):
    """Whoever asks for the id of a stream in a capture gets 900, and the capture is lost."""
    ran = accept(tmp_path, "--quick", "--only", "c", PHANTOM_CAPTURING_IDS=capturing_ids)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (row,) = json.loads((tmp_path / "gpu-acceptance.json").read_text())["rows"]
    assert (row["part"], row["verdict"]) == ("c", "books only")


def test_acceptance_says_what_failed(tmp_path):
    """A device on which nothing fits: the part fails, is named, and the exit says so."""
    ran = accept(tmp_path, "--quick", "--only", "d", PHANTOM_MEMORY="64MiB")
    assert ran.returncode == 1, ran.stdout + ran.stderr
    (row,) = json.loads((tmp_path / "gpu-acceptance.json").read_text())["rows"]
    assert (row["part"], row["verdict"]) == ("d", "FAILED")
    assert "FAILED" in ran.stdout


def test_acceptance_names_a_wrong_part(tmp_path):
    ran = accept(tmp_path, "--only", "az")
    assert ran.returncode == 2
    assert "there is no part z" in ran.stderr
