"""The Python package: when streams may wait for each other before memory is exhausted."""

import pytest

from conftest import GRUYERE, PHANTOM

ALLOWED = "waits:auto: a stream waits for another"
FORBIDDEN = "waits:auto: streams wait for each other only where"

# Two streams take turns: what one has used, with its work still to come, the other asks for. The
# host never waits. Prints the most that was held, and whether a stream was made to wait.
TURNS = """
import gruyere, torch
gruyere.enable()
{before}
streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
for turn in range(40):
    with torch.cuda.stream(streams[turn % 2]):
        block = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
        for _ in range(20):
            block.fill_(1)
        del block
print(torch.cuda.max_memory_reserved() >> 20)
"""
GROUP = """
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", rank=0, world_size={ranks}, store=FakeStore())
"""


def turns(installed, before="", **settings):
    """MiB held at the peak, and what was logged."""
    lags = {"PHANTOM_KERNEL_NS": "100000", "GRUYERE_LOG": "info"}
    ran = installed.code(TURNS.format(before=before), **lags, **settings).check()
    return int(ran.out.split()[-1]), ran.err


def test_in_a_process_that_is_alone_streams_take_turns_with_one_block(installed):
    held, said = turns(installed)
    assert ALLOWED in said
    assert held <= 80
    exhausted, said = turns(installed, GRUYERE_CONF="waits:oom")
    assert exhausted >= 128
    assert ALLOWED not in said and FORBIDDEN not in said


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS"])
def test_one_rank_of_several_that_a_launcher_tells_of_waits_only_where_memory_runs_out(
    installed, variable
):
    held, said = turns(installed, **{variable: "2"})
    assert held >= 128
    assert f"{FORBIDDEN}" in said and f"{variable}=2" in said
    assert ALLOWED not in said


def test_a_group_of_several_ranks_ends_the_waits_before_it_is_made_and_one_of_one_does_not(
    installed,
):
    held, said = turns(installed, GROUP.format(ranks=1))
    assert held <= 80 and FORBIDDEN not in said
    held, said = turns(installed, GROUP.format(ranks=2))
    assert held >= 128
    assert "a torch.distributed process group of 2 ranks" in said


def test_a_module_with_communication_of_its_own_ends_the_waits(installed):
    installed.write("mpi4py/__init__.py", "")
    held, said = turns(installed, "import mpi4py")
    assert held >= 128
    assert "imports mpi4py" in said


@pytest.mark.parametrize(
    "call", ["cuLaunchHostFunc", "cuStreamWaitValue32", "cuGraphAddHostNode"]
)
def test_a_host_function_or_a_wait_on_a_value_by_python_ends_the_waits(installed, call):
    installed.write("cuda/__init__.py", "")
    installed.write("cuda/bindings/__init__.py", "")
    installed.write("cuda/bindings/driver.py", f"def {call}(*arguments): return 0\n")
    held, said = turns(installed, f"from cuda.bindings import driver; driver.{call}(0, 0, 0)")
    assert held >= 128
    assert f"the program calls {call}" in said
    held, _ = turns(installed, "from cuda.bindings import driver")
    assert held <= 80


def test_a_host_function_of_any_library_ends_the_waits_where_ours_is_preloaded(installed):
    # torch's own, which waits for nothing: without us in LD_PRELOAD nobody sees it.
    before = "torch.cuda.nvtx._device_range_start('a range', 0)"
    held, said = turns(installed, before, LD_PRELOAD=f"{GRUYERE} {PHANTOM}")
    assert held >= 128
    assert f"{FORBIDDEN}" in said and "the program calls cudaLaunchHostFunc" in said
    held, said = turns(installed, LD_PRELOAD=f"{GRUYERE} {PHANTOM}")
    assert held <= 80 and FORBIDDEN not in said
    held, _ = turns(installed, before)
    assert held <= 80


def test_what_was_chosen_stays_whatever_the_program_does(installed):
    held, said = turns(installed, GROUP.format(ranks=2), GRUYERE_CONF="waits:budget")
    assert held <= 80
    assert FORBIDDEN not in said
