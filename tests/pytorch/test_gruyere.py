"""Gruyère under real PyTorch: through the bare constructor, and with every hook wired.

Each program checks, as it goes: what torch thinks live equals what the library says, the phantom's
physical memory equals what the library says it reserves, no two blocks overlap, and nothing is left
at the end (programs/gpu.py)."""

import os

import pytest

from conftest import GRUYERE, HERE, RECORDS, ROOT

BARE = (
    f"torch.cuda.memory.CUDAPluggableAllocator({str(GRUYERE)!r}, 'gruyere_malloc', 'gruyere_free')"
)


def test_the_one_liner_works_as_it_stands(phantom):
    code = f"""
import torch
torch.cuda.memory.change_current_allocator({BARE})
print(torch.ones(4, device="cuda").numel())
"""
    ran = phantom.run("", code=code).check()
    assert ran.out.strip() == "4"
    assert ran.err.count("WARN") == 1, ran.err
    assert "record_stream" in ran.err and "gruyere_announce_hooks" in ran.err


def test_hooks_announced_need_no_warning(phantom):
    ran = phantom.run("transformer", allocator="hooked").check()
    assert ran.err == ""


def test_tensors_on_several_streams(phantom, gruyere):
    phantom.run("several_streams", allocator=gruyere).check()


def test_streams_of_torchs_pools_are_announced_and_those_of_others_are_used_in_their_own_calls_only(
    phantom,
):
    settings = {"PYTHONPATH": ROOT / "python_loader", "GRUYERE_LIBRARY": GRUYERE}
    ran = phantom.run("passing_streams", **settings).check()
    assert ran.report == {"told": 128, "of_a_priority": 32, "first": True}


def test_tensors_on_several_streams_without_sharing(phantom):
    phantom.run("several_streams", allocator="hooked", GRUYERE_CONF="share:off").check()


@pytest.mark.parametrize(
    "conf",
    ["backing:pool", "backing:fixed", "backing:passthrough", "debug:poison+sync", "record:off"],
)
def test_every_switch_keeps_the_books(phantom, conf):
    phantom.run("several_streams", allocator="hooked", GRUYERE_CONF=conf).check()


@pytest.mark.parametrize("missing", ["vmm", "pools", "stream_ids", "vmm,pools,stream_ids"])
def test_devices_that_lack_something_work(phantom, missing):
    phantom.run("several_streams", allocator="hooked", PHANTOM_WITHOUT=missing).check()


def test_autograd_of_a_small_transformer(phantom, gruyere):
    ran = phantom.run("transformer", allocator=gruyere).check()
    assert ran.report["grads_dropped"]


def test_llama_holds_little_more_than_is_live(phantom):
    ours = phantom.run("llama", allocator="hooked").check().report
    torchs = phantom.run("llama", allocator="native").check().report
    print(
        f"LLaMA-7B, peak held over peak live: {ours['peak'] / ours['live_peak']:.4f}; torch's "
        "own allocator:"
        f" {torchs['peak'] / ours['live_peak']:.4f}"
    )
    assert ours["parameters"] == torchs["parameters"] == 6_738_415_616
    # Pages stay up to the slack, a 128th of what is live, and growth is by steps. torch's own holds
    # less here since 2.15 (1.0004), which allocates no workspace of cuBLAS's to stay.
    assert ours["peak"] <= 1.011 * ours["live_peak"]
    assert ours["peak"] <= 1.01 * torchs["peak"]


def test_llama_through_the_bare_constructor(phantom):
    phantom.run("llama", allocator="bare").check()


def test_out_of_memory_is_torchs_own_exception_and_the_program_goes_on(phantom, gruyere):
    ran = phantom.run("out_of_memory", allocator=gruyere, PHANTOM_MEMORY="1GiB").check()
    assert ran.report["type"] == "OutOfMemoryError"
    assert ran.report["arguments"] == 1
    assert ran.report["message"].startswith(
        "CUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 has "
    )
    assert ran.report["again"] == 5
    assert 12 <= ran.report["blocks"] <= 16


def test_thousands_of_random_allocations_from_threads(phantom, gruyere):
    ran = phantom.run("threads", allocator=gruyere).check()
    if gruyere == "hooked":
        assert ran.report["mallocs"] >= 15_000


def test_graphs_capture_and_replay(phantom, gruyere):
    ran = phantom.run("graphs", allocator=gruyere).check()
    assert ran.books["program"]["cuGraphLaunch"] == 12


def test_two_devices(phantom, gruyere):
    ran = phantom.run("two_devices", allocator=gruyere, PHANTOM_DEVICES=2).check()
    assert ran.report["devices"] == 2


@pytest.mark.parametrize(
    "conf, named",
    [
        ("bogus:1", ["bogus", "backing", "share"]),
        ("limit:lots", ["limit:lots"]),
        ("share:maybe", ["on|off"]),
    ],
)
def test_a_bad_configuration_stops_with_a_message_that_helps(phantom, gruyere, conf, named):
    ran = phantom.run("transformer", allocator=gruyere, GRUYERE_CONF=conf)
    assert ran.code == 1, (ran.code, ran.err)
    assert "Error" in ran.err and "GRUYERE_CONF" in ran.err
    for word in named:
        assert word in ran.err


@pytest.mark.thorough
def test_data_loader_workers_inherit_tensors(phantom, gruyere):
    ran = phantom.run("forked", allocator=gruyere).check()
    assert ran.report["total"] == 2 * 4 * sum(range(64))
    assert ran.report["child"] == 7
    assert ran.report["records"] == 1, "a child has unlinked its parent's record, or there was none"
    for name in ("cuMemFreeAsync", "cuMemFree_v2", "cuEventRecord", "cuCtxSynchronize"):
        assert ran.books["calls"].get(name, 0) == ran.books["allocator"].get(
            name.removesuffix("_v2"), 0
        )


@pytest.mark.parametrize("exit", ["", "deinitialize"])
def test_frees_after_the_exit_handlers(phantom, gruyere, exit):
    ran = phantom.run("late_frees", allocator=gruyere, PHANTOM_EXIT=exit).check()
    assert ran.out.strip() == "handler"
    assert "terminate" not in ran.err and "panicked" not in ran.err


def test_a_normal_exit_leaves_no_record_behind(phantom):
    ran = phantom.run("late_frees", allocator="hooked").check()
    assert [
        name for name in os.listdir(RECORDS) if "gruyere" in name and str(ran.pid) in name
    ] == []


@pytest.mark.parametrize(
    ("conf", "call"),
    [
        ("backing:pool", call)
        for call in ("cuMemAllocFromPoolAsync", "cuMemPoolCreate", "cuStreamCreate")
    ]
    + [
        ("backing:stitch", call)
        for call in ("cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess")
    ],
)
@pytest.mark.parametrize("nth", [1, 3])
def test_a_driver_call_that_fails_once_leaves_the_heap_sound(phantom, conf, call, nth):
    ran = phantom.run(
        "failing_driver", call, nth, 2, 0, allocator="hooked", GRUYERE_CONF=conf
    ).check()
    assert ran.report["survived"]
    assert len(ran.report["errors"]) <= 1


@pytest.mark.parametrize(
    ("call", "conf"),
    [("cuMemCreate", "backing:stitch"), ("cuMemAllocFromPoolAsync", "backing:pool")],
)
def test_a_lost_device_raises_and_does_not_crash(phantom, call, conf):
    ran = phantom.run("failing_driver", call, 2, 719, 1, allocator="hooked", GRUYERE_CONF=conf)
    assert ran.code == 0, ran.err
    assert ran.report["errors"] and not ran.report["survived"]
    assert not any("OutOfMemoryError" in error for error in ran.report["errors"])


def test_the_record_read_from_outside_says_what_torch_thinks(phantom):
    code = """
import torch, gpu
gpu.install()
kept = [torch.empty(n * 1000, dtype=torch.uint8, device="cuda") for n in range(1, 300)]
gpu.check_books()
outside = gpu.from_outside()
live = sum(gpu.rounded(t.numel()) for t in kept)
gpu.report(outside=outside, live=live, reserved=gpu.stats().reserved)
"""
    ran = phantom.run("", code=code, allocator="hooked", PYTHONPATH=HERE / "programs").check()
    (device,) = ran.report["outside"]["devices"]
    assert device["live_bytes"] == ran.report["live"]
    assert device["gauges"]["reserved_bytes"] == ran.report["reserved"]
