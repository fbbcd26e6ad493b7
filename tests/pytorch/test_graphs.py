"""CUDA graphs under real torch, in the ways that programs use them (programs/graph_lifetimes.py
checks the books as it goes)."""

import pytest


@pytest.mark.parametrize("capturing_ids", ["told", "invalidate"])
def test_graphs_shared_forked_failed_released_and_beside_threads(phantom, gruyere, capturing_ids):
    # Kernels take time, so that replays are still running when their graph goes.
    ran = phantom.run(
        "graph_lifetimes",
        allocator=gruyere,
        PHANTOM_KERNEL_NS=20_000,
        PHANTOM_COSTS="launches",
        PHANTOM_CAPTURING_IDS=capturing_ids,
    ).check()
    assert ran.report["message"].startswith("CUDA out of memory.")
    assert ran.report["before"] > 0
    # Released with a replay running: eager requests got none of it ...
    assert ran.report["still"] == ran.report["before"]
    if gruyere == "hooked":
        # ... until the device was past it.
        assert ran.report["after"] < ran.report["before"]
