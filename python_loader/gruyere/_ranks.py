"""The rank that the environment gives this process: by torch's own variables, else by those of an
MPI or Slurm launcher. The library has the same in crates/record/src/shared/launcher.rs, whose tests
say which of several launchers counts."""

from __future__ import annotations

import os
from typing import NamedTuple, Optional

# Rank, local rank, number of ranks: torchrun and the like; Open MPI, MVAPICH, MPICH with Intel MPI,
# PMIx; Slurm. MPI before Slurm: mpiexec may start its daemons by srun, whose variables the ranks
# then inherit.
_TORCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_SIZE"),
    ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),
    ("PMIX_RANK", "PMIX_LOCAL_RANK", "PMIX_SIZE"),
)
_SLURM = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")
# From this number on, Slurm's steps are its own: the batch script, the shell of `salloc`. Nothing
# has started ranks there, although SLURM_PROCID is 0 and SLURM_NTASKS the number asked for.
_SLURMS_OWN = 0xFFFFFFF0
# The variables in which any of them passes the number of processes.
SIZES = tuple(names[2] for names in (_TORCH, *_MPI, _SLURM))


class Place(NamedTuple):
    """A process's place in its job."""

    rank: Optional[int] = None
    local_rank: Optional[int] = None
    world_size: Optional[int] = None


def place() -> Place:
    """This process's place, as far as the environment has it."""
    torch = _of(_TORCH)
    launcher = Place() if torch.rank is not None else _of_launcher(torch)
    return torch if launcher.rank is None else launcher


def is_first_of_node() -> bool:
    """Whether this process is the one of its machine that prints what all would."""
    rank, local_rank, _ = place()
    # Without a local rank, one of the job.
    return (local_rank if local_rank is not None else rank or 0) == 0


def _of_launcher(torch: Place) -> Place:
    """The place by a launcher's variables; none where torch's variables say something else: then
    the program has started ranks itself, and the launcher's variables are those of their parent."""
    # Slurm's srun sets PMIX_RANK too, but no size.
    slurms = os.environ.get("PMIX_NAMESPACE", "").startswith("slurm.")
    mpi = [_of(names) for names in _MPI if not (names[0] == "PMIX_RANK" and slurms)]
    found = [one for one in (*mpi, _of_slurm()) if one.rank is not None]
    if not found:
        return Place()
    rank, local_rank, world_size = found[0]
    for other in found[1:]:
        # srun sets PMI_RANK and PMI_SIZE too, and the local rank by its own name alone.
        if world_size is not None and (rank, world_size) == (other.rank, other.world_size):
            local_rank = other.local_rank if local_rank is None else local_rank
    if (
        torch.world_size not in (None, world_size)
        or torch.local_rank not in (None, local_rank)
        or (world_size is not None and rank is not None and world_size <= rank)
    ):
        return Place()
    return Place(rank, local_rank, world_size)


def _of_slurm() -> Place:
    # A task of srun has a step; the script of sbatch, and what it starts, has none.
    step = number("SLURM_STEP_ID")
    step = number("SLURM_STEPID") if step is None else step
    if step is None or step >= _SLURMS_OWN:
        return Place()
    # SLURM_NTASKS may be the job's.
    size = number("SLURM_STEP_NUM_TASKS")
    of = _of(_SLURM)
    return of if size is None else of._replace(world_size=size)


def _of(names: tuple[str, str, str]) -> Place:
    return Place(*(number(name) for name in names))


def number(name: str) -> Optional[int]:
    """The number in a variable of the environment; None if it has none."""
    text = os.environ.get(name, "").strip()
    return int(text) if text.isdecimal() and text.isascii() else None
