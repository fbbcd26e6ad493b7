"""Runs a user's program as python itself would, and measures it from its import of torch to its
end.

Steps are those of torch's optimisers; if several take turns, those of the first."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from types import ModuleType
from typing import Any, Optional

from .. import _early_end, _launch, _stand_in, _startup
from .._dryrun.answers import Answers
from .._dryrun.settings import Settings
from .._imports import when_imported
from .._job import Job, unused
from .._sandbox import remedy, remedy_for_stdin
from .._sandbox.reach import Reach
from .._steps import _Leader
from .._torch import backward_end
from . import measure
from .measure import COMPLETED, FAILED, OUT_OF_MEMORY, Meter, Result
from .parts import Sampler


def main(text: str) -> None:
    request = json.loads(text)
    watch = Watch(
        request["allocator"], request["memory"], request["steps"], Reach(request["closed"])
    )
    watch.wants_parts = request["parts"]
    watch.settings = Settings(request["allocator"])
    watch.settings.watch()
    if _stand_in.OWNER in os.environ:
        # It invents what the program reads from the device.
        answers = Answers()
        answers.watch()
        watch.is_rank_of(request["ranks"], answers)
    run(watch, request)


def run(watch: Watch, request: dict[str, Any]) -> None:
    """Run and measure the program of the request, and exit as python does if it ends by an error.
    Writes the results to its file `answer`."""
    with _early_end.Ending():
        try:
            _measure(watch, request)
        except Exception as error:
            _launch._print_uncaught(error)
            sys.exit(1)


def _measure(watch: Watch, request: dict[str, Any]) -> None:
    # If a signal kills the program, the output names the line.
    faulthandler.enable()
    when_imported("torch", watch.imported)
    if request["allocator"] == "gruyere":
        _startup.required = True
        _startup.watch()
    pid = os.getpid()
    try:
        _launch._run(request["script"], request["module"], request["arguments"])
    except BaseException as error:
        watch.stopped_by(error)
        raise
    finally:
        # A forked child of the program may get here too.
        if os.getpid() == pid:
            with open(request["answer"], "w") as file:
                file.write(watch.result().to_json())


class Enough(SystemExit):
    """The requested number of steps is done."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        _early_end.told()


class Watch:
    # Whether to measure what Gruyère holds beyond live memory, which makes the times invalid.
    wants_parts = False
    # Keeps the allocator that the row names. A dry run has its own.
    settings: Optional[Settings] = None
    # If the program is the first rank of several.
    job: Optional[Job] = None
    # Whether the program was ended, which it may report as an error of its own (IPython does).
    is_enough = False

    def __init__(
        self, allocator: str, memory: Optional[int], steps: Optional[int], reach: Reach
    ) -> None:
        self.reach = reach
        reach.watch()
        # What the sandbox denied the program.
        self.refused: list[dict[str, str]] = []
        self.meter = Meter(allocator, memory)
        self.sampler: Optional[Sampler] = None
        self.steps = steps
        self.torch: Optional[ModuleType] = None
        self.leader = _Leader()
        self.found = Result(COMPLETED)
        self.last = (0, 0)
        # On a GPU: recorded at the end of each step.
        self.marks: list[Any] = []

    def is_rank_of(self, ranks: Optional[int], answers: Answers) -> None:
        """Run the program as the first of so many ranks, if a number is given."""
        if ranks is not None:
            self.job = Job(ranks, answers.answered)
            self.job.watch()

    def _lacks_ranks(self, outcome: str = FAILED) -> bool:
        """Whether the program should have been a rank and completed as none, which is its outcome
        then."""
        if self.found.outcome != COMPLETED or self.job is None or self.job.is_used:
            return False
        self.found.outcome, self.found.reason = outcome, unused(self.job.ranks)
        return True

    def imported(self, torch: ModuleType) -> None:
        self.torch = torch
        if self.settings is not None:
            self.settings.imported(torch)
        self.meter.prepare(torch)
        # Under torch's own allocator too: the process must not abort with its figures.
        backward_end.install(torch)
        if self.wants_parts:
            self.sampler = Sampler(torch)
            self.sampler.start()
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(self.stepped)
        self.last = now()

    def stepped(self, optimizer: Any, *_: Any) -> None:
        """Hook: an optimiser has stepped."""
        if not self.leader.stepped(optimizer):
            return
        self._note_host_time()
        self._mark()
        self.found.steps += 1
        self.meter.sample(self.torch)
        self.last = now()
        if self.steps is not None and self.found.steps >= self.steps:
            self._enough()

    def _note_host_time(self) -> None:
        """Record the time of a step: processor time on the stand-in, wall time on a GPU."""
        wall, processor = now()
        self.found.host_ns.append(
            processor - self.last[1] if self.meter.stand_in is not None else wall - self.last[0]
        )

    def _mark(self) -> None:
        """Record the end of a step on a GPU, and the time of the one before it if it is done."""
        if self.meter.stand_in is not None or self.torch is None:
            return
        cuda = self.torch.cuda
        if cuda.is_initialized() and not cuda.is_current_stream_capturing():
            mark = cuda.Event(enable_timing=True)
            mark.record()
            self.marks.append(mark)
            self._note_device_times()

    def _note_device_times(self) -> None:
        while len(self.marks) > 1 and self.marks[1].query():
            first = self.marks.pop(0)
            self.found.step_ns.append(round(first.elapsed_time(self.marks[0]) * 1e6))

    def _enough(self) -> None:
        self.is_enough = True
        raise Enough(0)

    def stopped_by(self, error: BaseException) -> None:
        if isinstance(error, SystemExit) and (self.is_enough or error.code in (None, 0)):
            return
        if self.torch is not None and measure.is_out_of_memory(self.torch, error):
            # Also if the program caught the error and then gave up with sys.exit(1).
            self.found.outcome, self.found.reason = OUT_OF_MEMORY, measure.first_line(error)
        elif isinstance(error, SystemExit):
            self.found.outcome, self.found.reason = FAILED, f"it exited with {error.code!r}"
        else:
            self.found.outcome, self.found.reason = FAILED, measure.first_line(error)
            self.refused = self.reach.behind(error)
            if self.refused:
                self.found.reason += f". {remedy(self.refused[-1])}"
            elif remedy_for_stdin(error):
                self.found.reason += f". {remedy_for_stdin(error)}"

    def result(self) -> Result:
        """The results, after the script has ended in any way."""
        found = self.found
        if self.settings is not None:
            found.left_out = sorted(self.settings.left_out)
        if found.outcome == FAILED:
            return found
        if self.torch is None:
            found.outcome, found.reason = FAILED, measure.NO_TORCH
            return found
        if self._lacks_ranks():
            return found
        if not found.host_ns:
            # Without an optimiser, the whole run is one step.
            self._note_host_time()
        try:
            if self.marks:
                self.torch.cuda.synchronize(0)
                self._note_device_times()
            self.meter.read(self.torch, found)
            if self.sampler is not None:
                found.parts = self.sampler.parts(found.allocated_peak, found.physical_peak)
        except Exception as error:
            found.outcome, found.reason = (
                FAILED,
                str(error) if isinstance(error, measure.Unfit) else measure.first_line(error),
            )
        return found


def now() -> tuple[int, int]:
    """The wall time and the processor time, in nanoseconds."""
    return time.perf_counter_ns(), time.process_time_ns()
