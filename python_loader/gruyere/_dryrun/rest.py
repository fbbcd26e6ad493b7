"""The rest of the program, after the steps of a dry run: an evaluation, a test, its end.

A run of the rest goes on after its steps. The iteration of the DataLoader that fed them ends, as at
the end of an epoch, and further ones give nothing: some epochs without steps, after which the
program may come to its end. Every other DataLoader gives a few batches, or all if each of the few
leaves memory behind: only then does the run show what an evaluation gathers. Where that takes too
long, what each batch leaves behind tells. The run ends with the program, or where it has trained
again too often.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
import time
import weakref
from types import ModuleType, TracebackType
from typing import Any, Callable, Optional

from .. import _early_end
from .._bench.measure import first_line
from .._bench.script import Enough
from .._imports import when_imported
from .identity import ByIdentity
from .lines import NOWHERE, Lines

# The batches that a DataLoader gives once the steps are made: the first may leave more behind than
# the others, and a batch may be let go in the next one.
BATCHES = 4
# The epochs without steps, and the seconds of them, for which a program is followed.
EPOCHS, _EPOCHS_SECONDS = 20, 10
# Batches that leave less than this part of what is live behind, all together, are little.
_PART = 100
# The rest may take this many seconds, or as long as the run until then.
_SECONDS = 60
# The seconds in which it ends once it is told to.
_PATIENCE = 15


class _Iteration:
    """An iteration of a DataLoader."""

    def __init__(self, loader: Any, line: str, made: Optional[str] = None) -> None:
        # None once it is gone: an iterator does not keep its DataLoader.
        self.loader = weakref.ref(loader)
        self.line = line
        # Where the DataLoader was made, or else its data: one that a loop makes is one.
        self.source: Any = made or id(getattr(loader, "dataset", loader))
        # The number of batches that the DataLoader has.
        self.batches: Optional[int] = None
        try:
            self.batches = len(loader)
        except Exception:
            # Its dataset has no length, or the program's own code for it fails.
            pass
        # Live bytes each time that the program asked for a batch, once the steps are made, and the
        # number that it was given.
        self.live: list[int] = []
        self.given = 0

    def growth(self) -> int:
        """The bytes that a batch leaves behind, on average; 0 if not each of the first does."""
        changes = [after - before for before, after in zip(self.live, self.live[1:])][1:]
        if min(changes[: BATCHES - 1], default=0) <= 0:
            return 0
        return max(0, sum(changes) // len(changes))

    def left(self) -> float:
        """The bytes that the batches which it has not given would leave behind."""
        given = len(self.live) - 1
        return self.growth() * (float("inf") if self.batches is None else self.batches - given)

    def gathers(self) -> bool:
        """Whether what those would leave behind is not little."""
        return self.left() >= max(1, self.live[-1] // _PART)


class Rest:
    def __init__(self, is_asked: bool) -> None:
        self.is_asked = is_asked
        self.torch: Any = None
        self.lines: Optional[Lines] = None
        self.pid = os.getpid()
        self.started = time.monotonic()
        self.iterations: ByIdentity[_Iteration] = ByIdentity()
        # Called with each batch.
        self.given: Callable[[], None] = lambda: None
        # The DataLoaders, each with the line where it was made, and the ids of the data of those
        # that were iterated.
        self.made: ByIdentity[str] = ByIdentity()
        self.iterated: set[int] = set()
        # The iteration that gave the latest batch, and the one that had given the last before the
        # latest step.
        self.latest: Optional[_Iteration] = None
        self.feeding: Optional[_Iteration] = None
        self.has_begun = False
        self.begun = 0.0
        # Of the iterations after the steps, but for those of the loader that fed them: the most
        # batches that one gave, and their sources.
        self.fed_by: Optional[_Iteration] = None
        self.batches = 0
        self.giving: set[Any] = set()
        # Whether a trainer was told to stop, and the bytes that its latest evaluation left behind.
        self.is_cut = False
        self.left = 0
        # The seconds that it may take.
        self.seconds: float = 0
        # The number of epochs without steps, and the line at which the latest began.
        self.epochs = 0
        self.epoch = ""
        # Where the program trains for longer than it is followed.
        self.again = ""
        self.over = threading.Event()
        self.guard: Optional[threading.Thread] = None
        # Until when batches are given that leave memory behind.
        self.patience = 0.0
        # Of the iterations that were ended before their last batch: the one whose others would
        # leave most behind.
        self.growing: Optional[_Iteration] = None
        # Why the rest could not be followed to its end.
        self.stopped = ""
        # The program's line where it ended by an error, and the library's below it.
        self.line = self.inside = ""

    def watch(self, torch: ModuleType, lines: Lines) -> None:
        """Install the hooks. Call once torch is imported."""
        self.torch, self.lines = torch, lines
        when_imported("torch.utils.data.dataloader", self._loaders)

    def _loaders(self, module: ModuleType) -> None:
        kind: Any = module.DataLoader
        iterator: Any = module._BaseDataLoaderIter
        kind.__init__ = self._making(kind.__init__)
        kind.__iter__ = self._beginning(kind.__iter__)
        iterator.__next__ = self._giving(iterator.__next__)

    def _making(self, make: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(make)
        def making(loader: Any, *arguments: Any, **options: Any) -> None:
            make(loader, *arguments, **options)
            if os.getpid() == self.pid and self.lines is not None:
                line = self.lines.of_stack(sys._getframe(1))
                if line != NOWHERE:
                    self.made[loader] = line

        return making

    def _unread(self) -> list[str]:
        """The lines of the DataLoaders that gave no batch, nor did another with their data: a
        framework may have made one in their place."""
        found = []
        for known, line in list(self.made.known.values()):
            loader = known()
            if loader is not None and id(getattr(loader, "dataset", loader)) not in self.iterated:
                found.append(line)
        return list(dict.fromkeys(found))

    def _beginning(self, begin: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(begin)
        def beginning(loader: Any) -> Any:
            if os.getpid() != self.pid or self.lines is None:
                return begin(loader)
            feeding = self.feeding
            if self.has_begun and feeding is not None and feeding.loader() is loader:
                self.epochs += 1
                self.epoch = self.lines.of_stack(sys._getframe(1))
                is_long = time.monotonic() - self.begun > _EPOCHS_SECONDS
                if is_long or self.epochs > EPOCHS:
                    self.again = self.epoch
                    raise Enough(0)
                return iter(())
            iterator = begin(loader)
            self.iterated.add(id(getattr(loader, "dataset", loader)))
            line = self.lines.of_stack(sys._getframe(1))
            self.iterations[iterator] = _Iteration(loader, line, self.made.get(loader))
            return iterator

        return beginning

    def _giving(self, give: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(give)
        def giving(iterator: Any) -> Any:
            of = self.iterations.get(iterator)
            if of is None or os.getpid() != self.pid:
                return give(iterator)
            if self.has_begun:
                self._sample(of)
                if of is self.feeding or self._has_enough(of):
                    raise StopIteration
            batch = give(iterator)
            if self.has_begun:
                self._count(of)
            self.given()
            self.latest = of
            return batch

        return giving

    def _sample(self, of: _Iteration) -> None:
        of.live.append(self.live())

    def live(self) -> int:
        """The live bytes of the device."""
        is_used = self.torch is not None and self.torch.cuda.is_initialized()
        return self.torch.cuda.memory_allocated() if is_used else 0

    def _count(self, of: _Iteration) -> None:
        # A trainer may fetch batches of its training ahead.
        loader, fed_by = of.loader(), self.fed_by
        if of is fed_by or (fed_by and loader is not None and loader is fed_by.loader()):
            return
        of.given += 1
        self.batches = max(self.batches, of.given)
        self.giving.add(of.source)

    def _has_enough(self, of: _Iteration) -> bool:
        """Whether an iteration has given the batches that the run needs."""
        if len(of.live) <= BATCHES:
            return False
        if not of.gathers():
            return True
        if time.monotonic() < self.patience:
            return False
        if self.growing is None or of.left() > self.growing.left():
            self.growing = of
        return True

    def step_is_over(self) -> None:
        self.feeding = self.latest

    def trains_again(self) -> None:
        """The program makes further steps, with another DataLoader, after which the run ends."""
        if self.has_begun and self.lines is not None:
            self.again = self.lines.of_stack(sys._getframe(1))

    def begin(self, is_training_by_itself: bool) -> bool:
        """Called after the steps. Returns whether the run goes on. `is_training_by_itself`: a
        trainer ends its training, so that its DataLoader need not end."""
        if self.has_begun or not self.is_asked or self.feeding is None:
            return self.has_begun
        # The DataLoaders end early.
        _early_end.told()
        self.has_begun, self.begun = True, time.monotonic()
        self.seconds = max(_SECONDS, self.begun - self.started)
        self.patience = self.begun + self.seconds / 2
        self.fed_by, self.is_cut = self.feeding, is_training_by_itself
        if is_training_by_itself:
            self.feeding = None
        self.guard = threading.Thread(target=self._guard, daemon=True, name="gruyere-rest")
        self.guard.start()
        return True

    def _guard(self) -> None:
        """Ends a rest that takes too long, or too much of the host's memory: a checkpoint of a
        model that was made on the stand-in, which never has its memory, may not fit there."""
        main = threading.main_thread().ident or 0
        deadline = self.begun + self.seconds
        first, room = _resident(), _available() // 2
        while not self.over.wait(0.05):
            grown = _resident() - first
            if grown > room * 3 // 2 or time.monotonic() > deadline + _PATIENCE:
                # It does not end by itself: the call that it is in goes on.
                os._exit(1)
            if grown > room:
                why = "it needs more than half of the host's free memory"
            elif time.monotonic() > deadline:
                why = f"it takes more than {self.seconds:.0f} s"
            else:
                continue
            if not self.stopped:
                self.stopped = why
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(main), ctypes.py_object(Enough)
                )

    def ended_by(self, error: BaseException, is_out_of_memory: bool) -> None:
        """The rest ended by an error."""
        if not is_out_of_memory and self.epochs and not self.stopped:
            # An epoch without steps is not the program's: what it has done until then counts.
            self.again = self.epoch
            return
        if self.lines is not None:
            frames = _frames(error.__traceback__)
            self.line, self.inside = self.lines.of_frames(frames), self.lines.inside(frames)
        if is_out_of_memory or self.stopped:
            return
        if isinstance(error, StopIteration):
            self.stopped = "its DataLoader was ended there, as at the end of an epoch"
        else:
            self.stopped = first_line(error)

    def facts(self) -> Optional[dict[str, Any]]:
        """What the run of the rest found; None if there was none."""
        self.over.set()
        if not self.has_begun:
            return None
        if self.guard is not None:
            self.guard.join(1)
        growth = None
        if self.growing is not None:
            growth = {
                "bytes_a_batch": self.growing.growth(),
                "batches": self.growing.batches,
                "given": len(self.growing.live) - 1,
                "line": self.growing.line,
            }
        return {
            "stopped": self.stopped, "line": self.line, "inside": self.inside, "growth": growth,
            "unread": self._unread(), "again": self.again, "cut": self.is_cut, "left": self.left,
            "batches": self.batches, "loaders": len(self.giving),
        }  # fmt: skip


def _frames(traceback: Optional[TracebackType]) -> list[dict[str, Any]]:
    """The frames of a traceback, innermost first, as torch's history has them."""
    found = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        found.append({"filename": code.co_filename, "line": traceback.tb_lineno})
        traceback = traceback.tb_next
    return found[::-1]


def _resident() -> int:
    """The host memory of this process, in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _available() -> int:
    """The host memory that programs may still take, in bytes."""
    with open("/proc/meminfo") as file:
        facts = dict(line.split(":", 1) for line in file)
    return int(facts["MemAvailable"].split()[0]) << 10
