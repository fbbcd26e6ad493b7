"""A process's record has the rank that its process group has, and its program's command, where no
launcher has set RANK."""

import json
import re
import subprocess
import sys

import pytest

from conftest import COMMAND, clean_environment, launched_environment

# Each rank leaves its record: it kills itself. Rank 0 has one already when its group is made.
RANKS = """
import os, signal, sys
import gruyere, torch
import torch.distributed as dist

# In spawned children too.
gruyere.enable()

def work(rank, ranks):
    from torch.testing._internal.distributed.fake_pg import FakeStore
    kept = [torch.ones(1 << 20, device="cuda")] if rank == 0 else []
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    dist.new_group([0])
    kept.append(torch.ones((1 + 7 * rank) << 20, device="cuda"))
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    context = torch.multiprocessing.get_context(sys.argv[1])
    children = [context.Process(target=work, args=(rank, 2)) for rank in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join()
"""


def run(folder, method, **settings):
    """The processes that left records, by rank, as `gruyere post --json` tells of them."""
    records = folder / "records"
    records.mkdir()
    (folder / "ranks.py").write_text(RANKS)
    ran = subprocess.run(
        [sys.executable, "-m", "gruyere", "ranks.py", method],
        env=launched_environment(records, PHANTOM_MEMORY="1GiB", **settings),
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    left = [post(records, file, "--json") for file in records.glob("*.record")]
    assert len(left) == 2, ran.stderr
    return sorted((json.loads(told)["state"]["process"] for told in left), key=ranked)


def ranked(process):
    return process["rank"] if process["rank"] is not None else -1


def post(records, *arguments):
    words = [COMMAND, "post", "--directory", records, *arguments]
    ran = subprocess.run(words, env=clean_environment(), capture_output=True, text=True)
    assert ran.returncode in (0, 3), ran.stderr
    return ran.stdout


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_a_process_group_tells_the_record_the_rank_and_a_child_shows_its_programs_command(
    tmp_path, method
):
    processes = run(tmp_path, method)
    assert [(one["rank"], one["world_size"]) for one in processes] == [(0, 2), (1, 2)]
    for one in processes:
        assert one["command"].endswith(f"-m gruyere ranks.py {method}"), one
    page = post(tmp_path / "records")
    assert re.search(r"^Rank 1 (\(.*\) )?had 32 MiB live at its peak, ", page, re.M), page


def test_what_the_environment_says_of_the_rank_holds(tmp_path):
    processes = run(tmp_path, "spawn", RANK="5", WORLD_SIZE="8")
    assert [(one["rank"], one["world_size"]) for one in processes] == [(5, 8), (5, 8)]
