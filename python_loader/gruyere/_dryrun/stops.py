"""Stopping a program cleanly after its steps.

An optimiser's step raises `Enough`. It is not an `Exception`, so a program that continues after
errors ends too; exit handlers run. A trainer that supports it gets a request to stop, and `Enough`
is raised when its training returns. What an evaluation of that trainer leaves behind is noted: only
one is run, and each later one may leave as much.
"""

from __future__ import annotations

import functools
import sys
from types import FrameType, ModuleType
from typing import Any, Callable, Optional

from .._bench.script import Enough
from .._imports import when_imported
from .rest import Rest

# The number of steps that a trainer may still take after the request to stop.
PATIENCE = 2


class Stops:
    def __init__(self, rest: Optional[Rest] = None) -> None:
        # A run of the steps alone has none of its own.
        self.rest = Rest(is_asked=False) if rest is None else rest
        self.enough = False
        # The number of running trainings that can be requested to stop.
        self.trainings = 0
        # Called with a trainer and the frame that has it train.
        self.begun: Callable[[Any, FrameType], None] = lambda *_: None

    def watch(self) -> None:
        """Install the hooks. Call before the trainers' modules are imported."""
        when_imported("transformers.trainer", self._transformers)
        for name in ("pytorch_lightning.trainer.trainer", "lightning.pytorch.trainer.trainer"):
            when_imported(name, self._lightning)
        for name in ("pytorch_lightning", "lightning.pytorch"):
            when_imported(f"{name}.loops.evaluation_loop", self._lightning_evaluation)

    def _transformers(self, module: ModuleType) -> None:
        trainer: Any = module.Trainer
        trainer.train = self._training(trainer.train)
        trainer.evaluate = self._evaluating(trainer.evaluate)
        handler: Any = module.CallbackHandler
        handler.on_step_end = self._asking(handler.on_step_end, _evaluates)
        handler.on_epoch_end = self._asking(handler.on_epoch_end, lambda *_: False)

    def _asking(
        self, call: Callable[..., Any], evaluates: Callable[[Any, Any], bool]
    ) -> Callable[..., Any]:
        """Wrap a callback of transformers to request that the trainer stop, without a save.
        Where the run goes on, it evaluates as it would, and if `evaluates` says so of the trainer's
        arguments and state."""

        @functools.wraps(call)
        def calling(handler: Any, arguments: Any, state: Any, *more: Any, **options: Any) -> Any:
            control = call(handler, arguments, state, *more, **options)
            if self.enough:
                asks = control.should_evaluate or evaluates(arguments, state)
                control.should_training_stop = True
                control.should_evaluate = self.rest.has_begun and asks
                control.should_save = False
            return control

        return calling

    def _lightning(self, module: ModuleType) -> None:
        trainer: Any = module.Trainer
        trainer.fit = self._training(trainer.fit)

        # An attribute of each trainer, which its loops read.
        def get(of: Any) -> bool:
            return self.enough or bool(vars(of).get("_gruyere_should_stop", False))

        def put(of: Any, value: bool) -> None:
            vars(of)["_gruyere_should_stop"] = value

        trainer.should_stop = property(get, put)

    def _lightning_evaluation(self, module: ModuleType) -> None:
        # Lightning 2.0 and newer.
        loop: Any = getattr(module, "_EvaluationLoop", None)
        if loop is not None:
            loop.run = self._evaluating(loop.run)

    def _evaluating(self, evaluate: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an evaluation to note what it leaves behind within a training that is to stop."""

        @functools.wraps(evaluate)
        def evaluating(*arguments: Any, **options: Any) -> Any:
            if not (self.rest.has_begun and self.trainings):
                return evaluate(*arguments, **options)
            before = self.rest.live()
            result = evaluate(*arguments, **options)
            self.rest.left = max(0, self.rest.live() - before)
            return result

        return evaluating

    def _training(self, train: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(train)
        def training(*arguments: Any, **options: Any) -> Any:
            self.trainings += 1
            if arguments:
                self.begun(arguments[0], sys._getframe(1))
            try:
                result = train(*arguments, **options)
            finally:
                self.trainings -= 1
            if self.enough and not self.rest.has_begun:
                raise Enough(0)
            return result

        return training

    def reached(self, steps: int, asked: int) -> None:
        """Called when the optimiser has done the steps of the run. Raises Enough, unless a running
        trainer can be requested to stop, or the run goes on."""
        self.enough = True
        goes_on = self.rest.begin(self.trainings > 0) or self.trainings > 0
        if not goes_on or steps >= asked + PATIENCE:
            self.rest.trains_again()
            raise Enough(0)


def _evaluates(arguments: Any, state: Any) -> bool:
    """Whether a trainer of transformers evaluates after one of its steps."""
    strategy = getattr(arguments, "eval_strategy", "no")
    every = getattr(state, "eval_steps", 0) or 0
    return getattr(strategy, "value", strategy) == "steps" and 0 < every <= state.max_steps
