"""The process of a run: runs and measures the program as `_bench.script` does, with hooks for an
analysed run."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Optional

from .._bench.measure import COMPLETED, FAILED, OUT_OF_MEMORY, Result, causes, is_out_of_memory
from .._bench.script import Enough, Watch, run
from .._sandbox.reach import Reach
from .answers import Answers
from . import standing
from .lines import Lines
from .live import analyse
from .hooks import Hooks
from .optimizers import Optimizers, short
from .partial import Partial
from .rest import Rest
from .settings import Settings
from .sizing import Sizing
from .stops import Stops
from .trials import trials

# The run is not possible with this torch or environment.
UNUSABLE = "unusable"
# The program completed, but there is nothing to measure.
NOTHING = "nothing"
# The sandbox denied the program something that it needs.
REFUSED = "refused"
# Steps before a request that was refused are not counted, of up to so many times those asked.
_IN_VAIN = 4


@dataclass
class Found(Result):
    """The results of a run."""

    facts: dict[str, Any] = field(default_factory=dict)
    """Facts about torch, and about what was answered and ignored."""
    analysis: Optional[dict[str, Any]] = None
    pid: int = 0
    """The program's process id."""
    refused: list[dict[str, str]] = field(default_factory=list)
    """What the sandbox denied, in order (`Run.refusals`)."""

    def to_json(self) -> str:
        return json.dumps(vars(self))


def main(request: str) -> None:
    asked = json.loads(request)
    away = standing.away()
    if away is not None:
        with open(asked["answer"], "w") as file:
            file.write(Found(UNUSABLE, away).to_json())
        return
    run(Worker(asked), asked)


def is_for_want_of_torch(error: BaseException) -> bool:
    """Whether the error is that of `import torch` where there is none."""
    return isinstance(error, ModuleNotFoundError) and error.name == "torch"


class Worker(Watch):
    found: Found

    def __init__(self, request: dict[str, Any]) -> None:
        super().__init__(request["allocator"], None, request["steps"], Reach(request["closed"]))
        self.found = Found(COMPLETED, pid=os.getpid())
        self.progress: int = request["progress"]
        # Child processes of the program must not hold it open.
        os.set_inheritable(self.progress, False)
        self.pid = os.getpid()
        self.analysed: bool = request["analysed"]
        self.module: Optional[str] = request["module"]
        self.hooks: Optional[Hooks] = None
        self.rest = Rest(request["rest"])
        self.stops = Stops(self.rest)
        self.stops.watch()
        self.answers = Answers()
        self.answers.watch()
        self.is_rank_of(request["ranks"], self.answers)
        self.settings = Settings(request["allocator"])
        self.settings.watch()
        self.optimizers = Optimizers()
        self.partial = Partial()
        self.sizing = Sizing()
        self.stops.begun = self.sizing.trains
        self.lines: Optional[Lines] = None
        # The number of steps after which the run is over.
        self.last_step: Optional[int] = None
        # Requests that were refused for want of memory until the last step ended.
        self.refusals = 0
        # Steps before the last of these, which are not in `found.steps`: of a batch that did not
        # fit, perhaps.
        self.in_vain = 0

    def imported(self, torch: ModuleType) -> None:
        self.found.facts = {"torch": str(torch.__version__), "cuda": torch.version.cuda}
        if torch.version.cuda is None:
            return
        if standing.away() is not None:
            # `result` gives the reason.
            raise Enough(0)
        lines = self.lines = Lines(os.getcwd(), self.module)
        if self.analysed:
            self.hooks = Hooks(torch, lines)
            self.hooks.install()
            self.rest.given = self.hooks.batch_is_given
        self.settings.imported(torch)
        self.optimizers.watch(torch, lines)
        self.partial.watch(torch)
        self.sizing.watch(torch, lines)
        self.rest.watch(torch, lines)
        super().imported(torch)
        self._tell("torch is imported")

    def stepped(self, optimizer: Any, *more: Any) -> None:
        if os.getpid() == self.pid:
            self.optimizers.stepped(optimizer)
            self.partial.stepped(optimizer)
            super().stepped(optimizer, *more)

    def _mark(self) -> None:
        super()._mark()
        self.optimizers.step_is_over()
        self.partial.step_is_over(self.optimizers.waiting)
        self.rest.step_is_over()

    def _note_host_time(self) -> None:
        super()._note_host_time()
        if self.hooks is not None:
            self.hooks.step_is_over()
        self._note_refusals()
        self._tell(f"step {self.found.steps + 1}")

    def _note_refusals(self) -> None:
        """Count the steps anew from the one that ends now if a request was refused in it: the
        program went on with less, or without what it tried."""
        if self.steps is None or self.last_step is not None:
            return
        refusals = self.meter.refused(self.torch)
        made = self.in_vain + self.found.steps
        if refusals > self.refusals and made < _IN_VAIN * self.steps:
            self.in_vain, self.found.steps = made, 0
        self.refusals = refusals

    def _enough(self) -> None:
        assert self.steps is not None
        if self.last_step is None:
            if self.optimizers.goes_on(self.found.steps, self.steps):
                return
            self.last_step = self.found.steps
            if self.lines is not None:
                self.found.facts["trials"] = trials(sys._getframe(), self.lines)
        self.stops.reached(self.found.steps, self.last_step)
        self._tell("after its steps")

    def stopped_by(self, error: BaseException) -> None:
        ended = any(isinstance(cause, Enough) for cause in causes(error))
        if ended and not (self.torch is not None and is_out_of_memory(self.torch, error)):
            # A program that is stopped after its steps may fail at its end; its steps are done.
            return
        if self.torch is None and any(is_for_want_of_torch(cause) for cause in causes(error)):
            # The environment is at fault, and no setting of the program helps.
            self.found.outcome = UNUSABLE
            self.found.reason = (
                f"{sys.executable} has no torch; install one that is built for CUDA "
                "(https://pytorch.org/get-started), which does not require a GPU, or name the "
                "Python that has it: --python PYTHON"
            )
            return
        if self.rest.has_begun:
            is_out = self.torch is not None and is_out_of_memory(self.torch, error)
            if isinstance(error, SystemExit) and error.code in (None, 0) and not is_out:
                # The program's own end.
                return
            self.rest.ended_by(self._first(error) if is_out else error, is_out)
            if not is_out:
                # The steps are done, and what was found until then counts.
                return
        super().stopped_by(error)
        # A file or a module that is missing, or the machine's CUDA toolkit, is no value.
        may_be_value = not isinstance(error, (OSError, ImportError)) and not self.refused
        if self.found.outcome == FAILED and self.hooks is not None and may_be_value:
            self.found.reason = self.found.reason.rstrip(".") + self._invented(self.hooks)
        if self.refused:
            self.found.outcome, self.found.refused = REFUSED, self.refused

    def _first(self, error: BaseException) -> BaseException:
        """The out-of-memory behind an error that the program has made of it."""
        for cause in causes(error):
            if isinstance(cause, self.torch.cuda.OutOfMemoryError):
                return cause
        return error

    def _invented(self, hooks: Hooks) -> str:
        """That values which the program has read may be behind its error."""
        if not hooks.seen.reads:
            return ""
        _, line, _, inside = hooks.seen.reads[-1]
        within = f" (in {inside})" if inside else ""
        return (
            ". The stand-in invents what a program reads from the device, which this one last did "
            f"at {line}{within}: the error may come from such a value"
        )

    def _tell(self, what: str) -> None:
        try:
            os.write(self.progress, f"{what}\n".encode())
        except OSError:
            # The reader is gone.
            pass

    def result(self) -> Result:
        found = self.found
        away = standing.away()
        if away is not None:
            found.outcome, found.reason = UNUSABLE, away
            return found
        if found.facts and found.facts["cuda"] is None:
            found.outcome = UNUSABLE
            found.reason = (
                f"torch {found.facts['torch']} is built without CUDA; install a torch built for "
                "CUDA (https://pytorch.org/get-started), which does not require a GPU"
            )
            return found
        if found.outcome in (REFUSED, UNUSABLE):
            return found
        if found.outcome == COMPLETED and not self._used_cuda():
            found.outcome = NOTHING
            found.reason = (
                "there is nothing to measure: the program used no CUDA memory in its own process. "
                "If its child processes do, give the script that one of them runs"
            )
            return found
        if self._lacks_ranks(UNUSABLE):
            return found
        result = super().result()
        if self.torch is not None:
            # The kernels in this build of torch.
            found.facts["architectures"] = self.torch.cuda.get_arch_list()
            found.facts["metadata"] = hasattr(self.torch._C, "_cuda_setMemoryMetadata")
            found.facts["answered"] = dict(self.answers.answered)
            found.facts["left_out"] = sorted(self.settings.left_out)
            found.facts["job"] = None if self.job is None else self.job.facts()
            found.facts["sizing"] = self.sizing.facts(self.torch)
            found.facts["never_stepped"] = self.optimizers.never()
            found.facts["has_rest"] = self.rest.feeding is not None
            found.facts["rest"] = self.rest.facts()
        if found.outcome == COMPLETED and self.steps is not None:
            made = len(self.optimizers.all)
            found.facts["short"] = short(
                made, self.in_vain + found.steps, self.steps, found.caught
            )
        if self.hooks is not None and found.outcome in (COMPLETED, OUT_OF_MEMORY):
            self._tell("reading the history")
            try:
                found.analysis = self._analysis(self.hooks)
            except Exception as error:
                # A run that is out of memory is not needed for its analysis.
                if found.outcome == COMPLETED:
                    found.outcome = FAILED
                    found.reason = f"the run cannot be analysed: {type(error).__name__}: {error}"
        return result

    def _used_cuda(self) -> bool:
        return self.torch is not None and self.torch.cuda.is_initialized()

    def _analysis(self, hooks: Hooks) -> dict[str, Any]:
        assert self.torch is not None
        hooks.close()
        traces = self.torch.cuda.memory._snapshot()["device_traces"]
        return analyse(
            traces[0] if traces else [], hooks.seen, hooks.lines, self.partial.found(),
            self.in_vain,
        )  # fmt: skip
