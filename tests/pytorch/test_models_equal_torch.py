"""The project's models of torch's allocators do what the real libc10_cuda does: to the byte, and on
the virtual clock."""

import json

import pytest

from conftest import HERE, RELEASE, ROOT

pytestmark = pytest.mark.thorough

DRIVER = RELEASE / "libtorch_driver.so"
EXPECTED = json.loads((HERE / "expected_peaks.json").read_text())["peak_bytes"]
TRACES = sorted(
    path.name.removesuffix(".trace.zst") for path in (ROOT / "traces").glob("*.trace.zst")
)
# Of the small ones those with several streams, with next to nothing live, and with everything kept.
SMALL = ["notebook", "ppo", "threads"]
ALLOCATORS = ["native", "expandable"]
COSTS = {0: "none", 1: "launches", 2: "calls"}


def path(trace):
    return ROOT / "traces" / f"{trace}.trace.zst"


def test_all_seven_traces_are_here():
    assert TRACES == sorted(EXPECTED)


@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("trace", TRACES)
def test_the_model_reserves_what_torch_reserves(phantom, trace, allocator):
    ran = phantom.run(
        "replay", path(trace), DRIVER, "peak", allocator=allocator, PHANTOM_MEMORY="200GiB"
    )
    facts = ran.check().report
    print(f"{trace} {allocator}: {facts['nanoseconds'] / facts['operations']:.0f} ns an operation")
    assert facts["real"] == facts["torch_says"]
    assert facts["model"] == facts["real"]
    assert EXPECTED[trace][allocator] == facts["real"]


@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("trace", SMALL)
def test_the_model_reserves_what_torch_reserves_for_small_programs(phantom, trace, allocator):
    file = ROOT / "traces" / "small" / f"{trace}.trace.zst"
    ran = phantom.run("replay", file, DRIVER, "peak", allocator=allocator, PHANTOM_MEMORY="200GiB")
    facts = ran.check().report
    assert facts["model"] == facts["real"] == facts["torch_says"]


def clock(phantom, trace, allocator, memory, kernel, costs):
    ran = phantom.run(
        "replay", path(trace), DRIVER, "clock", kernel, costs,
        allocator=allocator, PHANTOM_MEMORY=memory, PHANTOM_KERNEL_NS=kernel,
        PHANTOM_COSTS=COSTS[costs],
    )  # fmt: skip
    return ran.check().report


@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("trace", ["fsdp", "offload"])
def test_the_model_is_torch_on_the_timeline(phantom, trace, allocator):
    """Kernels of 20 us, 8 us of host a launch: the host runs ahead, and recorded blocks wait for
    their events."""
    report = clock(phantom, trace, allocator, "200GiB", 20_000, 1)
    assert report["model"] == report["real"]


@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize(
    "trace, memory", [("moe", "14.6GiB"), ("offload", "12GiB"), ("fsdp", "12.7GiB")]
)
def test_the_model_is_torch_on_a_device_that_is_hardly_large_enough(
    phantom, trace, memory, allocator
):
    """Giving everything back, synchronising and trying again; where that is not enough, both stop
    at the same operation."""
    report = clock(phantom, trace, allocator, memory, 20_000, 1)
    assert report["model"] == report["real"]


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_the_model_makes_torchs_driver_calls(phantom, allocator):
    """Every driver call at its cost. The model leaves out the free questions (torch asks for the
    capture status at each cudaMalloc, for an attribute at each segment): hence a small tolerance,
    in time only."""
    report = clock(phantom, "offload", allocator, "12GiB", 20_000, 2)
    real, model = report["real"], report["model"]
    assert (model["reached"], model["held_peak"]) == (real["reached"], real["held_peak"])
    assert model["host"] == pytest.approx(real["host"], rel=0.002)
    assert model["device_end"] == pytest.approx(real["device_end"], rel=0.002)
