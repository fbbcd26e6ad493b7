"""The project's models of torch's allocators reserve what the real libc10_cuda reserves, to the byte, on every trace."""

import json

import pytest

from conftest import HERE, RELEASE, ROOT

TRACES = sorted(path.name.removesuffix(".trace.zst") for path in (ROOT / "traces").glob("*.trace.zst"))
EXPECTED = json.loads((HERE / "expected_peaks.json").read_text())["peak_bytes"]


def replay(phantom, trace, allocator):
    path = ROOT / "traces" / f"{trace}.trace.zst"
    ran = phantom.run("replay", path, RELEASE / "libtorch_driver.so", allocator=allocator, PHANTOM_MEMORY="200GiB")
    return ran.check().report


def test_all_seven_traces_are_here():
    assert TRACES == sorted(EXPECTED)


@pytest.mark.parametrize("allocator", ["native", "expandable"])
@pytest.mark.parametrize("trace", TRACES)
def test_the_model_reserves_what_torch_reserves(phantom, trace, allocator):
    facts = replay(phantom, trace, allocator)
    print(f"{trace} {allocator}: {facts['nanoseconds'] / facts['operations']:.0f} ns an operation")
    assert facts["real"] == facts["torch_says"]
    assert facts["model"] == facts["real"]
    assert EXPECTED[trace][allocator] == facts["real"]
