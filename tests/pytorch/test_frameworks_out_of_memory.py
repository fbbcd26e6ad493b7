"""Out of memory is not the end: the batch-size finders of the frameworks, and the loop that people
write, on a device of 3 GiB.

Each finds a batch that is at least as large as the one that it finds under torch's own allocator,
and goes on training."""

import pytest

from framework_runs import DOORS, MODULE, PLAIN, run

SMALL = {"PHANTOM_MEMORY": "3GiB"}


def both(folder, script, *arguments):
    """What it says through each door, beside what it says under torch's own allocator."""
    torchs = run(folder, script, *arguments, launch=PLAIN, through="torch", **SMALL)
    for door in DOORS:
        ours = run(folder, script, *arguments, launch=MODULE, through=door, **SMALL)
        (device,) = ours.devices
        assert device["out_of_memories"] > 0, "nothing ran out: the test tests nothing"
        yield ours.answer, torchs.answer


def test_a_loop_that_halves_the_batch(tmp_path):
    for ours, torchs in both(tmp_path, "batch_size_halved"):
        assert ours["batch"] >= torchs["batch"]
        assert len(ours["tried"]) >= 3
        assert ours["message"].startswith("CUDA out of memory. Tried to allocate ")
        # torch's sentence, word for word, up to what is free.
        assert (
            ours["message"].split(" of which ")[0].split(" MiB. ")[1]
            == torchs["message"].split(" of which ")[0].split(" MiB. ")[1]
        )


@pytest.mark.thorough
def test_accelerates_finder_and_the_trainer_that_uses_it(tmp_path):
    for ours, torchs in both(tmp_path, "batch_size_accelerate"):
        assert ours["batch"] >= torchs["batch"] and ours["trainer"] >= torchs["trainer"]
        assert len(ours["tried"]) >= 3 and ours["trainer_steps"] == 3


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["power", "binsearch"])
def test_lightnings_finder(tmp_path, mode):
    for ours, torchs in both(tmp_path, "batch_size_lightning", mode):
        assert ours["batch"] >= torchs["batch"] and ours["steps"] == 3
