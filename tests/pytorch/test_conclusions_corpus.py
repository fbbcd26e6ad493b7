"""The conclusion is right on programs with known causes: sixteen of the corpus (conclusions/), of
each kind one or two; `cargo xtask conclusions` runs all. And a plain training is accused of
nothing, whatever its batch and the device."""

import dataclasses
import sys

import pytest

from conftest import HERE

sys.path.insert(0, str(HERE / "conclusions"))

import corpus  # noqa: E402

CHOSEN = [
    "fresh/lora_limited",
    "known/another_library",
    "known/batch_one_operation_a_line",
    "known/closure",
    "known/evaluation_collects",
    "known/evaluation_keeps_graphs",
    "known/forward_hook",
    "known/inference_without_no_grad",
    "known/lengths_that_vary",
    "known/list_of_losses",
    "known/masks_by_length",
    "known/one_hot",
    "known/queue_of_bounded_length",
    "known/shared_layer",
    "known/states_of_adam",
    "known/traceback_kept",
]


@pytest.mark.parametrize("name", CHOSEN)
def test_the_conclusion_is_right(name, tmp_path):
    program = corpus.read(corpus.HERE / f"{name}.py")
    told = corpus.run(program, tmp_path)
    assert corpus.judge(program, told) == (corpus.RIGHT, ""), told.text


@pytest.mark.parametrize("batch, device", [(8, "8GiB"), (24, "16GiB"), (40, "40GiB")])
def test_a_plain_training_with_too_large_a_batch_is_accused_of_nothing(batch, device, tmp_path):
    program = corpus.read(corpus.HERE / "known" / "plain_training.py")
    program = dataclasses.replace(program, true=program.true | {"device": device})
    told = corpus.run(program, tmp_path, B=str(batch))
    assert corpus.judge(program, told) == (corpus.RIGHT, ""), told.text


def test_the_table_has_every_program_of_the_corpus():
    table = (corpus.HERE / "README.md").read_text()
    missing = [program.name for program in corpus.programs() if f"`{program.name}`" not in table]
    assert not missing, "run `cargo xtask conclusions`"
