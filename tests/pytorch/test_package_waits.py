"""The Python package: when streams may wait for each other before memory is exhausted."""

import pytest

from conftest import GRUYERE, PHANTOM

ALLOWED = "waits:auto: a stream waits for another"
FORBIDDEN = "waits:auto: streams wait for each other only where"

# Two streams take turns: what one has used, with its work still to come, the other asks for, once
# the first has allocated again (a small tensor). The host never waits. Prints the most that was
# held, and whether a stream was made to wait.
TURNS = """
import gruyere, torch
gruyere.enable()
{before}
streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
small = []
for stream in streams:
    with torch.cuda.stream(stream):
        small.append(torch.empty(1, device="cuda"))
# As many as are within what a stream may stand idle.
for turn in range(4):
    with torch.cuda.stream(streams[turn % 2]):
        block = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
        for _ in range(20):
            block.fill_(1)
        del block
        small.append(torch.empty(1, device="cuda"))
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


# A stream frees a block with its work still to come, and allocates again; another is made to wait
# in some way, and asks for as much. Prints of each way whether it got that block, and did not grow
# the heap.
PASSED_ON = """
import gruyere, json, torch
gruyere.enable()
other, waiting, third = (torch.cuda.Stream() for _ in range(3))
with torch.cuda.stream(other):
    small = [torch.empty(1, device="cuda")]

def after(wait):
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    with torch.cuda.stream(other):
        block = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
        for _ in range(20):
            block.fill_(1)
        early = other.record_event()
        del block
        small.append(torch.empty(1, device="cuda"))
    wait(early)
    before = torch.cuda.memory_reserved()
    with torch.cuda.stream(waiting):
        torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
        return torch.cuda.memory_reserved() == before

def on_the_current_stream(_):
    event = torch.cuda.Event()
    with torch.cuda.stream(other):
        event.record()
    with torch.cuda.stream(waiting):
        event.wait()

def recorded_elsewhere(_):
    event = other.record_event()
    event.record(third)
    waiting.wait_event(event)

def given_out(_, name="cuda_event"):
    event = other.record_event()
    getattr(event, name)
    waiting.wait_event(event)

def of_its_own_kind(kind):
    event = torch.cuda.Event(**{kind: True})
    event.record(other)
    waiting.wait_event(event)

ways = {
    "wait_stream": lambda _: waiting.wait_stream(other),
    "wait_event": lambda _: waiting.wait_event(other.record_event()),
    "wait": on_the_current_stream,
    "none": lambda _: None,
    "before the free": waiting.wait_event,
    "by another stream": lambda _: third.wait_stream(other),
    "recorded elsewhere": recorded_elsewhere,
    "handle given out": given_out,
    "handle given out as an id": lambda _: given_out(_, "event_id"),
    "shared with processes": lambda _: of_its_own_kind("interprocess"),
    "recorded by graphs": lambda _: of_its_own_kind("external"),
}
print(json.dumps({name: after(wait) for name, wait in ways.items()}))
"""


def test_a_rank_whose_program_makes_a_stream_wait_passes_memory_to_it_and_no_other(installed):
    lags = {"PHANTOM_KERNEL_NS": "1000000", "WORLD_SIZE": "2"}
    passed = installed.code(PASSED_ON, **lags).check().report
    gave = {name for name, passed_on in passed.items() if passed_on}
    assert gave == {"wait_stream", "wait_event", "wait"}


def test_of_an_event_that_threads_record_at_once_nobody_knows_which_record_was_last():
    from gruyere._torch.events import _Recorded

    recorded = _Recorded()
    recorded.begin()
    recorded.end(1)
    assert recorded.mark == 1
    recorded.begin()
    assert recorded.mark == 0
    recorded.begin()
    recorded.end(2)
    recorded.end(3)
    assert recorded.mark == 0
    recorded.begin()
    recorded.end(4)
    assert recorded.mark == 4
    recorded.begin()
    recorded.give_up()
    recorded.end(5)
    recorded.begin()
    recorded.end(6)
    assert recorded.mark == 0
