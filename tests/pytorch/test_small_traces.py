"""The programs of traces/small/programs give the traces of traces/torch-2.15."""

import json
import subprocess

import pytest

from conftest import COMMAND, ROOT, TARGET, clean_environment

SMALL = ROOT / "traces" / "small"
# What the torch of these tests makes of the programs; the traces beside them are torch 2.11's.
NEWER = ROOT / "traces" / "torch-2.15"


def measured(folder, file):
    """What the bench says of a trace, without its name."""
    ran = subprocess.run(
        [COMMAND, "bench", "--trace", file, "--models-only", "--json", "--out", folder],
        env=clean_environment(), capture_output=True, text=True, check=True,
    )  # fmt: skip
    (trace,) = json.loads(ran.stdout)["traces"]
    return trace


def test_a_program_is_there_for_each_trace_that_was_not_given():
    given = set("cache dcgan dlrm gnn gpt2 prefetch resnet50 unet".split())
    traces, newer = (
        {path.name.removesuffix(".trace.zst") for path in folder.glob("*.trace.zst")}
        for folder in (SMALL, NEWER)
    )
    programs = {path.stem for path in (SMALL / "programs").glob("*.py")}
    programs -= {"llama", "ranks", "recorder"}  # what several programs have in common
    assert traces == given | programs
    assert newer == programs


@pytest.mark.parametrize("program", ["fsdp2", "sage", "threads"])
def test_a_program_recorded_again_gives_its_trace(tmp_path, program):
    environment = clean_environment() | {"CARGO_TARGET_DIR": str(TARGET)}
    subprocess.run(
        [SMALL / "record", program, "--plain", "--to", tmp_path], env=environment, check=True
    )
    again = measured(tmp_path, tmp_path / f"{program}.trace")
    assert again == measured(tmp_path, NEWER / f"{program}.trace.zst")
