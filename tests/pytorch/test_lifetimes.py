"""What the Python package knows and does about lifetimes, steps, pools and alerts, with the real torch on the phantom."""

import re

import pytest

from conftest import GRUYERE, HERE, ROOT

PACKAGE = ROOT / "python_loader"
STEPS = 5

# Optimisers whose states are made where they can be placed as persistent, and others.
KINDS = ["adamw", "foreach", "fused", "several", "each", "scaler", "wrapped", "nested", "construct", "loaded", "explicit", "momentum", "plain", "lbfgs"]


def run(phantom, *arguments, code=None, **settings):
    """A program that enables the package by itself."""
    settings = {"PYTHONPATH": f"{PACKAGE}:{HERE / 'programs'}", "GRUYERE_LIBRARY": GRUYERE, **settings}
    return phantom.run("lifetimes", *arguments, code=code, allocator="bare", **settings)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_and_states_end_up_persistent_and_nothing_else(phantom, kind):
    report = run(phantom, kind).check().report
    print(report)
    assert report["valid"]


@pytest.mark.parametrize("kind", ["adamw", "foreach", "fused", "scaler", "wrapped", "nested", "explicit"])
def test_a_step_is_marked_once_whoever_calls_step(phantom, kind):
    assert run(phantom, kind).check().report["steps"] == STEPS
