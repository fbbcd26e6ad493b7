"""The comparison of speed drives both allocators as it says; its times are not judged here."""

import json
import subprocess

import pytest

from conftest import RELEASE, ROOT

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("allocator", ["native", "expandable"])
@pytest.mark.parametrize(
    "trace, operations, threads",
    [("moe", 170_643, 1), ("offload", 141_436, 1), ("moe", 170_643, 2)],
)
def test_both_allocators_serve_every_call_in_one_process_and_keep_nothing(
    phantom, trace, operations, threads, allocator
):
    path = ROOT / "traces" / f"{trace}.trace.zst"
    ran = phantom.run(
        "pace", path, RELEASE / "libtorch_driver.so", 2, threads,
        allocator=allocator, PHANTOM_MEMORY="200GiB", PHANTOM_COSTS="none",
    )  # fmt: skip
    facts = ran.check().report
    # Requests of 0 bytes are left out; the same calls in every pass.
    assert len(facts["operations"]) == 1
    assert 0.9 * operations < facts["operations"][0] <= operations
    assert [len(facts[who]) for who in ("torch", "gruyere", "loop")] == [2, 2, 2]
    # Both did work beyond the loop, and both hold what they had; together they are all that is
    # held, and all of it goes back.
    assert min(facts["torch"] + facts["gruyere"]) > max(facts["loop"])
    assert 0 < facts["torch_held"] < facts["held"]
    assert facts["left"] == 0
    assert facts["valid"] == 0


def test_the_command_prints_the_comparison_with_both_of_torchs_allocators():
    command = [ROOT / "tests" / "pytorch" / "pace", "--passes", "1", "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    found = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    assert [facts["torch"] for facts in found] == ["native", "expandable"]
    assert all(facts["passes"] == 1 and facts["ratio"] > 0 for facts in found)
