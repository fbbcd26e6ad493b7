"""What the Python package knows and does about lifetimes, steps, pools and alerts, with the real torch on the phantom."""

import pytest

from conftest import GRUYERE, HERE, ROOT

PACKAGE = ROOT / "python_loader"
STEPS = 5

# By kind of optimiser, what of its states is placed among persistent blocks from the start: all of it where `_init_group` makes them, nothing
# where they are made among the temporaries of the first step, and some where several do as they do.
KINDS = {
    "adamw": "all",
    "foreach": "all",
    "fused": "all",
    "scaler": "all",
    "wrapped": "all",
    "construct": "all",
    "loaded": "all",
    "explicit": "all",
    "compiled": "all",
    "sharded": "all",
    "nested": "some",
    "several": "some",
    "each": "some",
    "momentum": "none",
    "plain": "none",
    "lbfgs": "none",
}


def run(phantom, program, *arguments, **settings):
    """A program that enables the package by itself."""
    settings = {"PYTHONPATH": PACKAGE, "GRUYERE_LIBRARY": GRUYERE, **settings}
    return phantom.run(program, *arguments, allocator="bare", **settings)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_and_states_end_up_persistent_and_nothing_else_and_a_step_is_a_step(phantom, kind):
    report = run(phantom, "lifetimes", kind).check().report
    assert report["parameters"] > 1 << 20 and (report["states"] > 1 << 20 or kind == "plain")
    expected = report["parameters"] + report["states"]
    if kind == "lbfgs":
        # Much of its state is made anew at every step, and so is no longer lived than one.
        assert report["parameters"] < report["live"]["persistent"] <= expected
    else:
        assert report["live"]["persistent"] == expected
    if kind not in ("construct", "sharded"):
        assert report["moved"]["persistent"] == report["parameters"], "what a module moves to the device is placed"
    placed = report["first"]["persistent"] - report["moved"]["persistent"]
    if KINDS[kind] == "some":
        assert 0 < placed < report["states"]
    else:
        assert placed == (report["states"] if KINDS[kind] == "all" else 0)
    # Whoever calls step(), how many optimisers take turns, and whether the program marks its steps itself as well.
    assert report["steps"] == (2 * STEPS if kind == "loaded" else STEPS)
    assert report["valid"]


@pytest.mark.parametrize("part", ["whole", "routes", "behind"])
def test_pools(phantom, part):
    run(phantom, "pools", part).check()


@pytest.mark.parametrize("part", ["lifetimes", "numbers"])
def test_marks(phantom, part):
    run(phantom, "marks", part).check()


def test_alerts_are_heard_on_a_thread_of_their_own(phantom):
    ran = run(phantom, "marks", "alerts").check()
    assert ran.err.count("which listens to alerts, failed") == 4


def test_a_passed_threshold_is_heard_with_its_text_and_its_value(phantom):
    run(phantom, "marks", "thresholds", GRUYERE_CONF="alert:live>500MiB=callback+live>1TiB=callback").check()


@pytest.mark.parametrize("conf", ["reserve:persistent=64MiB+step=32MiB", "reserve:step=1%"])
def test_a_reserve_is_mapped_at_the_first_request(phantom, conf):
    ran = run(phantom, "lifetimes", "plain", GRUYERE_CONF=conf).check()
    assert ran.report["valid"]


def test_a_reserve_that_cannot_be_had_stops_the_program_with_what_to_do(phantom):
    ran = run(phantom, "lifetimes", "plain", GRUYERE_CONF="reserve:persistent=9000GiB")
    assert ran.code == 1
    for word in ("RuntimeError", "reserve:persistent=", "could not be mapped", "reserve less"):
        assert word in ran.err, ran.err
