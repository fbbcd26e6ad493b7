"""What is registered with NCCL stays where it is, for as long as it is registered: NCCL hands it to
peers and network cards, which go on using those bytes of the device."""

import importlib.metadata

import pytest

from conftest import GRUYERE, ROOT
from environment import minor

HAS_NEWER_GROUPS = minor(importlib.metadata.version("torch")) >= (2, 15)

# Ordinary memory from before the process group and after, of which pages move.
PROGRAM = """
import os, sys, torch
import torch.distributed as dist
from torch._C import _accelerator_setAllocatorSettings as change
door, kind = sys.argv[1:]
if door != "torch":
    import gruyere
    gruyere.enable(door=door)
if kind == "settings":
    change("max_split_size_mb:64,expandable_segments:False")
MIB = 1 << 20
def tensor(mib):
    return torch.empty(mib * MIB // 4, device="cuda")
early = tensor(256)
graph = torch.cuda.CUDAGraph()
pool = torch.cuda.MemPool() if kind == "pool" else None
if kind in ("graph", "released"):
    with torch.cuda.graph(graph):
        result = early * 2
    graph.replay()
if kind == "released":
    graph.reset()
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
gradient = tensor(64)
dist.all_reduce(gradient)
torch.cuda.synchronize()
if kind == "graph":
    graph.reset()
result = None
if kind == "pool":
    with torch.cuda.use_mem_pool(pool):
        mine = tensor(30)
    group = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cuda"))
    group.register_mem_pool(pool)
    dist.all_reduce(mine)
    group.deregister_mem_pool(pool)
    del mine, group
del early, graph, pool
torch.cuda.empty_cache()
for mib in range(12, 160, 12):
    many = [tensor(mib) for _ in range(6)]
    dist.all_reduce(many[0])
    del many
    torch.cuda.empty_cache()
dist.all_reduce(gradient)
torch.cuda.synchronize()
dist.destroy_process_group()
print("ended")
"""
# Of torch before 2.15, or of 2.15 on request: they register where the other variable asks for it.
EARLIER = {"TORCH_DIST_USE_NCCL2": "0", "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "1"}


def ran(phantom, door, kind="", **settings):
    environment = {"PYTHONPATH": ROOT / "python_loader", "GRUYERE_LIBRARY": GRUYERE}
    return phantom.run(None, door, kind, code=PROGRAM, **environment, **settings)


@pytest.mark.parametrize(
    "kind, settings",
    [
        ("", {}),
        ("", EARLIER),
        ("", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}),
        ("settings", {}),
        ("graph", {}),
        ("released", {}),
    ],
)
def test_ordinary_memory_is_not_registered_or_not_when_it_moves(phantom, kind, settings):
    ended = ran(phantom, "native", kind, **settings).check()
    assert ended.out.strip() == "ended"
    # A graph's memory stays until the graph is gone.
    kept = kind == "graph" and HAS_NEWER_GROUPS
    assert ended.books["registrations"] == kept


@pytest.mark.parametrize("groups", [{}, {"TORCH_DIST_USE_NCCL2": "0"}])
def test_of_a_mempool_its_own_segments_are_registered(phantom, groups):
    ended = ran(phantom, "native", "pool", **groups).check()
    assert ended.out.strip() == "ended" and ended.books["registrations"] >= 1


@pytest.mark.parametrize("groups", [{}, EARLIER])
def test_torchs_own_segments_are_registered_and_stay(phantom, groups):
    ended = ran(phantom, "torch", **groups).check()
    if groups or HAS_NEWER_GROUPS:
        assert ended.books["registrations"] > 10


def test_the_stand_in_tells_of_registered_memory_that_moves(phantom):
    """torch's own, where segments expand: a graph's are registered, and unmapped with it."""
    if not HAS_NEWER_GROUPS:
        pytest.skip("torch before 2.15 registers no graph's memory")
    ended = ran(phantom, "torch", "graph", PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    (stale,) = ended.books["stale_registrations"]
    assert "registered with NCCL, and have moved" in stale


def test_through_the_pluggable_door_process_groups_are_those_of_earlier_versions(phantom):
    ended = ran(phantom, "pluggable").check()
    assert ended.out.strip() == "ended" and ended.books["registrations"] == 0


def test_what_the_pluggable_door_cannot_have_is_an_error_and_not_the_end_of_the_process(phantom):
    if not HAS_NEWER_GROUPS:
        pytest.skip("torch before 2.15 has no such process groups")
    code = """
import torch, gruyere
import torch.distributed as dist
gruyere.enable(door="pluggable")
for name in ("nccl2", "nccl-lazy"):
    try:
        dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1)
        raise SystemExit(f"{name} was made")
    except gruyere.GruyereError as error:
        assert "the native door supports it" in str(error), error
"""
    environment = {"PYTHONPATH": ROOT / "python_loader", "GRUYERE_LIBRARY": GRUYERE}
    ended = phantom.run(None, code=code, TORCH_DIST_USE_NCCL2=1, **environment)
    assert ended.code == 0, ended.err
    assert ended.err.count("TORCH_DIST_USE_NCCL2=0") == 1, ended.err
