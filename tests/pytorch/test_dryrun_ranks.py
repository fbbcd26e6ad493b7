"""`--ranks`: the first rank of a job, run without the others, needs what it would need with
them."""

import json
import re
import subprocess
import sys

import pytest

from conftest import COMMAND
from dry_runs import dry, dryrun, row, told
from environment import PACKAGE

# Buckets of gradients beside the backward pass, a step count of its own, and what torch has seen.
DDP = """
import os
import sys
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group(sys.argv[1])
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(12)]).cuda()
model = nn.parallel.DistributedDataParallel(model, device_ids=[rank])
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(64, 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"peak {torch.cuda.max_memory_allocated()} B\\n", end="", flush=True)
dist.barrier()
dist.destroy_process_group()
"""

FSDP2 = """
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", 0))
model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)]).cuda()
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    model(torch.randn(16, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

# What a program sees of its job, and what it gets from the others.
SEEN = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("nccl", rank=int(os.environ["RANK"]),
                        world_size=int(os.environ["WORLD_SIZE"]))
assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 6, "nccl")
assert torch.cuda.device_count() == int(os.environ["LOCAL_WORLD_SIZE"]) == 3
assert dist.is_torchelastic_launched() and os.environ["GROUP_WORLD_SIZE"] == "2"
group = dist.new_group([0, 1, 2], backend="gloo")
assert (dist.get_world_size(group), dist.get_backend(group)) == (3, "gloo")
assert dist.get_rank(dist.new_group([4, 5])) == -1

mine = {"rank": 0}
every = [None] * 6
dist.all_gather_object(every, mine)
assert every == [mine] * 6 and every[1] is not mine
first = [None] * 6
dist.gather_object(mine, first, dst=0)
assert first == [mine] * 6
dist.gather_object(mine, None, dst=1)
sent = [mine, 2]
dist.broadcast_object_list(sent, src=0)
assert sent == [mine, 2]
got = [None]
dist.scatter_object_list(got, list("abcdef"), src=0)
assert got == ["a"]
dist.barrier()

parts = torch.ones(4, device="cuda").new_empty(24)
dist.all_gather_into_tensor(parts, torch.ones(4, device="cuda"))
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    loss = model(torch.ones(8, 64, device="cuda")).sum()
    loss.backward()
    dist.all_reduce(loss.detach())
    optimizer.step()
    optimizer.zero_grad()
"""

# The ranks are the program's own processes.
SPAWN = """
import sys
import torch
import torch.distributed as dist
import torch.multiprocessing


def main(rank, ranks):
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:1", rank=rank, world_size=ranks)
    torch.cuda.set_device(rank)
    model = torch.nn.Linear(256, 256).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(8, 256, device="cuda")).sum().backward()
        optimizer.step()


if __name__ == "__main__":
    ranks = int(sys.argv[1]) or torch.cuda.device_count()
    torch.multiprocessing.spawn(main, (ranks,), nprocs=ranks)
"""

PIPELINE = """
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
model = torch.nn.Linear(256, 256).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    out = model(torch.ones(8, 256, device="cuda"))
    gradient = torch.empty_like(out)
    for work in dist.batch_isend_irecv([
        dist.P2POp(dist.isend, out.detach(), 1), dist.P2POp(dist.irecv, gradient, 1),
    ]):
        work.wait()
    out.backward(gradient)
    optimizer.step()
"""

ALONE = """
import torch

model = torch.nn.Linear(256, 256).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(8, 256, device="cuda")).sum().backward()
    optimizer.step()
"""


def program(folder, text):
    (folder / "train.py").write_text(text)
    return "train.py"


def test_a_rank_beside_none_has_live_what_each_of_two_real_ones_has(tmp_path):
    name = program(tmp_path, DDP)
    line = ["--gpu", "h100-80", "--alloc", "gruyere", "--ranks", "2", "--json", "--", name, "nccl"]
    document = told(dryrun(tmp_path, *line))
    _, environment = dry()
    both = subprocess.run(
        [sys.executable, "-m", "gruyere", "--stand-in", "--steps", "all", "-m",
         "torch.distributed.run", "--nproc-per-node", "2", name, "gloo"],
        env=environment | {"PHANTOM_DEVICES": "2", "PYTHONPATH": str(PACKAGE)},
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    # Not by their exit code: gloo's threads may abort a rank that has ended.
    peaks = [int(peak) for peak in re.findall(r"peak (\d+) B", both.stdout)]
    live = row(document, "gruyere")["peak_live"]
    assert len(peaks) == 2, both.stderr
    # A thread of gloo's frees each collective's block of 512 B when it comes to it, seldom behind
    # the peak, and then one or two of them.
    assert all(peak - live in (0, 512, 1024) for peak in peaks), (peaks, live, both.stderr)


def test_what_is_sharded_is_a_ranks_share_and_the_answer_says_what_was_run(tmp_path):
    name = program(tmp_path, FSDP2)
    line = ["--gpu", "a100-40", "--alloc", "gruyere", "--ranks", "8", "--json=all.json"]
    ran = dryrun(tmp_path, *line, "--", name)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    document = json.loads((tmp_path / "all.json").read_text())
    assert document["program"]["ranks"] == 8
    # Two of the size of the weights, of 8 x (1024 x 1024 + 1024) x 4 B, by 8 ranks.
    share = 2 * (1024 * 1024 + 1024) * 4
    assert share <= document["peak"]["kinds"]["optimizer states"] < share * 1.02
    said = " ".join(ran.stdout.split())
    assert "It fits these 3 steps of the first of 8 ranks on a100-40" in said
    assert "Of 8 ranks the first was run" in said
    assert "buffers of NCCL" in said


def test_a_program_sees_its_job_and_gets_from_the_others_what_it_has(tmp_path):
    name = program(tmp_path, SEEN)
    line = ["--gpu", "a100-40", "--alloc", "gruyere", "--ranks", "6", "--json", "--", name]
    document = told(dryrun(tmp_path, *line, LOCAL_WORLD_SIZE="3"))
    assert any("other ranks" in said for said in document["trust"]["answered"])


def test_of_ranks_that_a_program_spawns_the_first_is_run(tmp_path):
    name = program(tmp_path, SPAWN)
    line = ["--gpu", "a100-40", "--alloc", "gruyere", "--ranks", "4", "--json", "--", name]
    assert told(dryrun(tmp_path, *line, "0"))["program"]["steps"] == 3


def test_another_number_of_ranks_than_the_programs_is_an_error_that_names_both(tmp_path):
    ran = dryrun(tmp_path, "--ranks", "4", "--", program(tmp_path, SPAWN), "2")
    assert ran.returncode == 1
    assert "init_process_group(world_size=2): --ranks 4 runs the first of 4 ranks" in ran.stderr


def test_the_first_stage_of_a_pipeline_stands_for_no_other(tmp_path):
    name = program(tmp_path, PIPELINE)
    line = ["--gpu", "a100-40", "--alloc", "gruyere", "--ranks", "2", "--json", "--", name]
    document = told(dryrun(tmp_path, *line), 4)
    assert any("its ranks send to each other" in reason for reason in document["trust"]["reasons"])


@pytest.mark.parametrize("command", ["dryrun", "compare"])
def test_a_program_without_ranks_is_told_so(tmp_path, command):
    name = program(tmp_path, ALONE)
    line, environment = dry("--ranks", "2")
    line[1] = command
    if command == "compare":
        line = [COMMAND, "compare", "--stand-in", "--ranks", "2", "--", sys.executable]
    ran = subprocess.run(
        [*line, name], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == (2 if command == "dryrun" else 1)
    assert "--ranks 2 had no effect: the program made no process group" in ran.stderr


def test_a_comparison_has_all_rows_of_the_first_rank(tmp_path):
    name = program(tmp_path, FSDP2)
    _, environment = dry()
    ran = subprocess.run(
        [COMMAND, "compare", "--stand-in", "--ranks", "8", "--json", "all.json", "--",
         sys.executable, name],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "Of 8 ranks the first ran" in ran.stdout
    report = json.loads((tmp_path / "all.json").read_text())
    assert report["settings"]["ranks"] == 8 and report["programs"][0]["comparable"]


def test_a_comparison_on_a_gpu_takes_no_ranks(tmp_path):
    name = program(tmp_path, FSDP2)
    _, environment = dry()
    ran = subprocess.run(
        [COMMAND, "compare", "--ranks", "8", "--", sys.executable, name],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 2 and "--ranks 8: " in ran.stderr and "--stand-in" in ran.stderr
