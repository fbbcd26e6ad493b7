"""What the Python package knows and does about lifetimes, steps, pools and alerts, with the real
torch on the phantom."""

import pytest

from conftest import GRUYERE, HERE, ROOT

PACKAGE = ROOT / "python_loader"
STEPS = 5

KINDS = """adamw foreach fused scaler wrapped construct loaded explicit compiled sharded nested
    several each momentum plain lbfgs copied unpickled""".split()


def run(phantom, program, *arguments, **settings):
    """A program that enables the package by itself."""
    settings = {"PYTHONPATH": PACKAGE, "GRUYERE_LIBRARY": GRUYERE, **settings}
    return phantom.run(program, *arguments, allocator="bare", **settings)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_and_states_are_counted_as_persistent_and_nothing_else_and_a_step_is_a_step(
    phantom, kind
):
    report = run(phantom, "lifetimes", kind).check().report
    assert report["parameters"] > 1 << 20 and (report["states"] > 1 << 20 or kind == "plain")
    expected = report["parameters"] + report["states"]
    if kind == "lbfgs":
        # Much of its state is made anew at every step, and so is no longer lived than one.
        assert report["parameters"] < report["live"]["persistent"] <= expected
    else:
        assert report["live"]["persistent"] == expected
    if kind not in ("construct", "sharded"):
        assert report["moved"]["persistent"] == report["parameters"], (
            "what a module moves to the device is counted at once"
        )
    assert set(report["placed"]) == {"auto"}, "and all of it lies among the rest"
    # Whoever calls step(), how many optimisers take turns, and whether the program marks its steps
    # itself as well.
    assert report["steps"] == (2 * STEPS if kind == "loaded" else STEPS)
    assert report["valid"]


@pytest.mark.parametrize("part", ["whole", "routes"])
def test_pools(phantom, part):
    run(phantom, "pools", part).check()


def test_what_the_program_says_places_and_what_the_package_knows_is_counted_only(phantom):
    run(phantom, "marks", "placed").check()


@pytest.mark.parametrize("part", ["lifetimes", "recurrent", "numbers"])
def test_marks(phantom, part):
    run(phantom, "marks", part).check()


def test_alerts_are_heard_on_a_thread_of_their_own(phantom):
    ran = run(phantom, "marks", "alerts").check()
    assert ran.err.count("the alert listener ") == 4


def test_a_passed_threshold_is_heard_with_its_text_and_its_value(phantom):
    run(
        phantom, "marks", "thresholds", GRUYERE_CONF="alert:live>500MiB=callback+live>1TiB=callback"
    ).check()


@pytest.mark.parametrize("conf", ["reserve:persistent=64MiB+step=32MiB", "reserve:step=1%"])
def test_a_reserve_is_mapped_at_the_first_request(phantom, conf):
    ran = run(phantom, "lifetimes", "plain", GRUYERE_CONF=conf).check()
    assert ran.report["valid"]


def test_a_reserve_that_cannot_be_had_stops_the_program_with_what_to_do(phantom):
    ran = run(phantom, "lifetimes", "plain", GRUYERE_CONF="reserve:persistent=9000GiB")
    assert ran.code == 1
    for word in ("RuntimeError", "reserve:persistent=", "could not be mapped", "reserve less"):
        assert word in ran.err, ran.err
