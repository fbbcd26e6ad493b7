"""torch's own allocator under LD_PRELOAD: served (`preload:manage`) or watched (`preload:observe`),
with torch none the wiser."""

import subprocess
import sys

import pytest

from conftest import COMMAND, GRUYERE, PHANTOM, RELEASE, ROOT, TARGET, clean_environment

PRELOAD = f"{GRUYERE} {PHANTOM}"
UNCACHED = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def preloaded(phantom, mode, allocator="native", **settings):
    conf = f"preload:{mode}"
    return phantom.run(
        "preloaded", allocator=allocator, LD_PRELOAD=PRELOAD, GRUYERE_CONF=conf, **settings
    )


@pytest.mark.thorough
def test_watched_torchs_allocator_is_itself_and_seen_from_outside(phantom):
    watched = preloaded(phantom, "observe").check()
    report = watched.report
    assert report["arrived"]
    for state in (report["high"], report["low"]):
        # torch reserves segments by cudaMalloc; each is a live block of the record.
        assert (
            0
            < state["torch"]
            == state["phantom"]
            == state["plain"]
            == state["live"]
            == state["reserved"]
        )
    assert report["low"]["live"] < report["high"]["live"]
    (process,) = report["top"]
    assert process["devices"][0]["live_bytes"] == report["high"]["live"]
    blocks = report["map"]["largest_live_blocks"]
    assert (
        report["map"]["reserved_bytes"] == report["high"]["live"]
        and blocks[0]["bytes"] >= blocks[-1]["bytes"] > 0
    )

    # Call for call the same as without us, but for one question a malloc: which device.
    alone = phantom.run("preloaded", allocator="native").check()
    assert alone.report["high"]["live"] is None
    with_us, without = watched.books["calls"], alone.books["calls"]
    assert with_us.pop("cudaGetDevice") == without.pop("cudaGetDevice") + without["cudaMalloc"]
    assert with_us == without and watched.books["program"] == alone.books["program"]


def test_served_torchs_allocator_gets_its_segments_from_the_heap(phantom):
    report = preloaded(phantom, "manage").check().report
    assert report["arrived"] and report["valid"] == 0
    for state in (report["high"], report["low"]):
        assert 0 < state["torch"] == state["live"] <= state["reserved"] == state["phantom"]
        # Not one was the runtime's.
        assert (state["plain"], state["bad_frees"]) == (0, 0)
    (process,) = report["top"]
    assert process["devices"][0]["live_bytes"] == report["high"]["live"]
    assert report["map"]["reserved_bytes"] == report["high"]["reserved"]


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["observe", "manage"])
def test_expandable_segments_are_left_alone(phantom, mode):
    """torch maps them itself (cuMemCreate and cuMemMap, which the driver hands out by address):
    they are not allocations, and nobody's but its."""
    ran = preloaded(phantom, mode, allocator="expandable").check()
    high = ran.report["high"]
    assert ran.report["arrived"] and high["live"] in (None, 0)
    assert high["torch"] == high["phantom"]
    assert ran.books["calls"]["cuMemMap"] > 0


def test_uncached_torch_is_served_call_by_call(phantom):
    report = preloaded(phantom, "manage", **UNCACHED).check().report
    assert report["arrived"] and report["valid"] == 0
    high, low = report["high"], report["low"]
    assert 0 < high["live"] <= high["reserved"] == high["phantom"]
    assert (high["plain"], high["bad_frees"]) == (0, 0)
    assert low["live"] < high["live"]


def test_uncached_torch_is_watched_call_by_call(phantom):
    report = preloaded(phantom, "observe", **UNCACHED).check().report
    assert report["arrived"]
    assert report["high"]["live"] == report["high"]["reserved"] > report["low"]["live"]


@pytest.mark.parametrize("mode", ["observe", "manage"])
def test_out_of_memory_is_still_torchs_own(phantom, mode):
    code = """
import torch
held = []
try:
    while True:
        held.append(torch.empty(64 << 20, dtype=torch.uint8, device="cuda"))
except torch.OutOfMemoryError as error:
    assert "CUDA out of memory. Tried to allocate 64.00 MiB" in str(error), error
count = len(held)
del held
# torch gives back what it caches and asks again.
large = torch.empty(800 << 20, dtype=torch.uint8, device="cuda")
print(count, torch.cuda.memory_reserved() >> 20, torch.cuda.memory_stats()["num_ooms"])
"""
    settings = {"LD_PRELOAD": PRELOAD, "GRUYERE_CONF": f"preload:{mode}", "PHANTOM_MEMORY": "1GiB"}
    ran = phantom.run("", code=code, **settings).check()
    assert ran.out.split() == ["16", "800", "1"]


def test_gruyere_run_sums_a_training_up(phantom):
    code = f"""
import os, subprocess, sys
train = '''import torch; torch.backends.cudnn.enabled = False
x = torch.zeros(64 << 20, device='cuda'); print(torch.cuda.memory_reserved())'''
environment = os.environ | {{"LD_PRELOAD": {str(PHANTOM)!r}}}
ran = subprocess.run([{str(COMMAND)!r}, "run", "--observe", "--library", {str(GRUYERE)!r}, "--",
                      sys.executable, "-c", train],
                     env=environment, capture_output=True, text=True)
sys.stderr.write(ran.stderr)
assert ran.returncode == 0 and ran.stdout.strip() == str(256 << 20), ran
"""
    ran = phantom.run("", code=code)
    assert ran.code == 0, ran.err
    assert "observed" in ran.err and "256.00 MiB" in ran.err


@pytest.mark.thorough
def test_the_table_of_uncached_torch_is_made():
    command = [
        sys.executable,
        ROOT / "benches/uncached_torch.py",
        "--traces",
        "llama7b_lora",
        "--rounds",
        "1",
    ]
    command += [
        "--build",
        RELEASE,
        "--libraries",
        TARGET / "phantom-libs",
        "--python",
        sys.executable,
    ]
    ran = subprocess.run(command, env=clean_environment(), capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in ran.stdout.splitlines()
        if line.startswith("| llama7b_lora")
    ]
    hold = {row[1]: float(row[4]) for row in rows}
    assert list(hold) == [
        "torch's caching",
        "torch's expandable segments",
        "uncached torch",
        "uncached torch, managed",
    ]
    # What others measure too: torch's own is 1.2651 (bench), and ours packs tighter.
    assert hold["torch's caching"] == pytest.approx(1.2651, abs=0.02)
    assert 1 <= hold["uncached torch, managed"] < 1.06
    assert len({row[7] for row in rows}) == 1
