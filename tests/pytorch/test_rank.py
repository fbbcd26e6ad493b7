"""A process's record has the rank that its process group has, and its program's command, where no
launcher has set RANK; else that of an MPI or Slurm launcher."""

import json
import re
import subprocess
import sys

import pytest

from conftest import COMMAND, clean_environment, launched_environment
from gruyere import _ranks

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


SRUN = {"SLURM_STEP_ID": 0, "SLURM_STEP_NUM_TASKS": 8, "SLURM_NTASKS": 8}
TASK = SRUN | {"SLURM_PROCID": 5, "SLURM_LOCALID": 1}


@pytest.mark.parametrize(
    ("variables", "expected", "prints"),
    [
        ({"RANK": 5, "LOCAL_RANK": 1, "WORLD_SIZE": 8, "PMI_RANK": 2}, (5, 1, 8), False),
        (
            {"OMPI_COMM_WORLD_RANK": 5, "OMPI_COMM_WORLD_LOCAL_RANK": 1, "OMPI_COMM_WORLD_SIZE": 8},
            (5, 1, 8),
            False,
        ),
        ({"PMI_RANK": 4, "PMI_SIZE": 8, "MPI_LOCALRANKID": 0}, (4, 0, 8), True),
        ({"PMI_RANK": 5, "PMI_SIZE": 8, **TASK}, (5, 1, 8), False),
        ({"PMIX_RANK": 5}, (5, None, None), False),
        (TASK, (5, 1, 8), False),
        # mpiexec's daemons were started by srun, one on each node.
        ({"PMI_RANK": 5, "PMI_SIZE": 16, **TASK}, (5, None, 16), False),
        # A batch script, the shell of salloc, ranks that a task of srun starts itself.
        ({"SLURM_PROCID": 0, "SLURM_LOCALID": 0, "SLURM_NTASKS": 8}, (None, None, None), True),
        ({**TASK, "SLURM_STEP_ID": 4294967290}, (None, None, None), True),
        ({**TASK, "LOCAL_RANK": 0, "WORLD_SIZE": 16}, (None, 0, 16), True),
    ],
)
def test_the_package_knows_the_ranks_of_mpi_and_slurm(monkeypatch, variables, expected, prints):
    for names in (_ranks._TORCH, *_ranks._MPI, _ranks._SLURM):
        for name in names:
            monkeypatch.delenv(name, raising=False)
    for name in ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS", "PMIX_NAMESPACE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    assert _ranks.place() == expected
    assert _ranks.is_first_of_node() == prints


def test_a_rank_of_mpi_has_it_in_its_record_and_those_that_it_starts_have_their_own(tmp_path):
    alone = 'import os, signal; x = __import__("torch").ones(1 << 20, device="cuda")\n'
    (tmp_path / "alone.py").write_text(alone + "os.kill(os.getpid(), signal.SIGKILL)\n")
    records = tmp_path / "records"
    records.mkdir()
    mpi = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"}
    subprocess.run(
        [sys.executable, "-m", "gruyere", "alone.py"],
        env=launched_environment(records, PHANTOM_MEMORY="1GiB", **mpi),
        cwd=tmp_path,
    )
    (file,) = records.glob("*.record")
    process = json.loads(post(records, file, "--json"))["state"]["process"]
    assert (process["rank"], process["local_rank"], process["world_size"]) == (2, 1, 4)
    (tmp_path / "spawned").mkdir()
    processes = run(tmp_path / "spawned", "spawn", **mpi)
    assert [(one["rank"], one["world_size"]) for one in processes] == [(0, 2), (1, 2)]
