"""Real training frameworks, unmodified scripts (frameworks/): the same program under torch's own
allocator and with Gruyère in the launch line, through each door, does the same steps, sees the same
memory live, and breaks no rule."""

import itertools

import pytest

from framework_runs import (
    ACCELERATE_MODULE,
    ACCELERATE_PLAIN,
    DOORS,
    LAUNCHERS,
    MODULE,
    PLAIN,
    VARIABLE,
    run,
)


def both(folder, script, *arguments, lines=(PLAIN, MODULE), **settings):
    """Runs the script under torch's own allocator, and through each door; all must give the same
    answer. The peaks of what is live differ by little: torch counts the rest of a block that it
    does not split as allocated, and the phantom's values, on which paths depend, are what memory
    held."""
    torchs = run(folder, script, *arguments, launch=lines[0], through="torch", **settings)
    for door in DOORS:
        ours = run(folder, script, *arguments, launch=lines[1], through=door, **settings)
        assert ours.answer == torchs.answer
        assert ours.live_peak == pytest.approx(torchs.live_peak, rel=0.02)
        print(
            f"{script}, {door}: live {ours.live_peak / 2**20:.1f} MiB; held "
            f"{ours.devices[0]['physical_peak'] / 2**20:.1f},"
            f" by torch {torchs.devices[0]['physical_peak'] / 2**20:.1f}"
        )
    return torchs.answer


def test_data_loader_workers_pinned_memory_and_a_prefetching_stream(tmp_path):
    assert both(tmp_path, "data_loader")["steps"] == 36


@pytest.mark.thorough
def test_multiprocessing_spawn(tmp_path):
    answer = both(tmp_path, "spawn", lines=(PLAIN, VARIABLE), PHANTOM_DEVICES=2, processes=3)
    assert answer["ranks"] == [0, 1] and answer["steps"] == 8


def test_multiprocessing_spawn_inherits_the_launch_line(tmp_path):
    answer = run(
        tmp_path, "spawn", launch=MODULE, through="native", PHANTOM_DEVICES=2, processes=3
    ).answer
    assert answer["ranks"] == [0, 1] and answer["steps"] == 8


# Who launches and by which door are two questions: the doors take turns.
@pytest.mark.thorough
@pytest.mark.parametrize("line, door", [*zip(LAUNCHERS, itertools.cycle(DOORS))])
def test_launchers_ranks_their_workers_and_children_are_on_gruyere(tmp_path, line, door):
    ran = run(
        tmp_path, "ranks", launch=LAUNCHERS[line], through=door, PHANTOM_DEVICES=2, processes=4
    )
    assert ran.answer == {"steps": 4, "world": 2}
    # A device a rank, in the rank and in its child.
    used = [[device["live_peak"] > 0 for device in process["devices"]] for process in ran.processes]
    assert sorted(used) == [[False, True], [False, True], [True, False], [True, False]]


def test_fsdp2(tmp_path):
    assert both(tmp_path, "fsdp2")["steps"] == 8


@pytest.mark.thorough
def test_accelerate_launch(tmp_path):
    assert both(tmp_path, "accelerated", lines=(ACCELERATE_PLAIN, ACCELERATE_MODULE)) == {
        "steps": 16,
        "device": "cuda",
    }


def test_transformers_trainer(tmp_path):
    assert both(tmp_path, "trainer", "small")["steps"] == 12


@pytest.mark.thorough
def test_transformers_trainer_on_seven_billion_parameters(tmp_path):
    answer = both(tmp_path, "trainer", "7b")
    assert answer == {"steps": 4, "parameters": 6_738_415_616}


@pytest.mark.thorough
def test_lightning(tmp_path):
    assert both(tmp_path, "lightning_fit") == {"steps": 32, "device": "cuda:0"}


@pytest.mark.thorough
def test_peft_lora(tmp_path):
    answer = both(tmp_path, "lora")
    assert answer["steps"] == 4 and answer["trainable"] == 6 * 2 * (512 * 16 * 2)


@pytest.mark.thorough
def test_the_transformer_of_diffusers(tmp_path):
    assert both(tmp_path, "diffusion") == {"steps": 4, "image": [4, 4, 32, 32]}
