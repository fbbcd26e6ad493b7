"""Stopping a program cleanly after its steps.

An optimiser's step raises `Enough`. It is not an `Exception`, so a program that continues after
errors ends too; exit handlers run. A trainer that supports it gets a request to stop, and `Enough`
is raised when its training returns.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any, Callable

from .._bench.script import Enough
from .._imports import when_imported

# The number of steps that a trainer may still take after the request to stop.
PATIENCE = 2


class Stops:
    def __init__(self) -> None:
        self.enough = False
        # The number of running trainings that can be requested to stop.
        self.trainings = 0

    def watch(self) -> None:
        """Install the hooks. Call before the trainers' modules are imported."""
        when_imported("transformers.trainer", self._transformers)
        for name in ("pytorch_lightning.trainer.trainer", "lightning.pytorch.trainer.trainer"):
            when_imported(name, self._lightning)

    def _transformers(self, module: ModuleType) -> None:
        trainer: Any = module.Trainer
        trainer.train = self._training(trainer.train)
        handler: Any = module.CallbackHandler
        for name in ("on_step_end", "on_epoch_end"):
            setattr(handler, name, self._asking(getattr(handler, name)))

    def _asking(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a callback of transformers to request that the trainer stop, without a further
        evaluation or save."""

        @functools.wraps(call)
        def calling(*arguments: Any, **options: Any) -> Any:
            control = call(*arguments, **options)
            if self.enough:
                control.should_training_stop = True
                control.should_evaluate = control.should_save = False
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

    def _training(self, train: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(train)
        def training(*arguments: Any, **options: Any) -> Any:
            self.trainings += 1
            try:
                result = train(*arguments, **options)
            finally:
                self.trainings -= 1
            if self.enough:
                raise Enough(0)
            return result

        return training

    def reached(self, steps: int, asked: int) -> None:
        """Called when the optimiser has done the steps of the run. Raises Enough, unless a running
        trainer can be requested to stop."""
        self.enough = True
        if not self.trainings or steps >= asked + PATIENCE:
            raise Enough(0)
