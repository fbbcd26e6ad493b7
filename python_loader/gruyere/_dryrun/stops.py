"""How a run ends after its steps: the program is told nothing worse than a clean stop.

An optimiser's step raises `Enough`, which is no `Exception`, so that a program that goes on after
errors ends all the same; what is to be done at its exit is done. Trainers that can be asked to stop
are asked, and `Enough` comes where their training would have returned.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any, Callable

from .._bench.script import Enough
from .._imports import when_imported

# Steps that a trainer may still take after the request to stop.
PATIENCE = 2


class Stops:
    def __init__(self) -> None:
        self.enough = False
        # Running trainings that can be asked.
        self.trainings = 0

    def watch(self) -> None:
        """Before anything of them is imported."""
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
        """A callback of transformers', which tells the trainer to stop, and to leave nothing on the
        disk that is not what was trained."""

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

        # An attribute of each trainer's, read by its loops.
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
        """An optimiser has stepped so often that the run is to end. Raises Enough, unless a trainer
        is there to be asked."""
        self.enough = True
        if not self.trainings or steps >= asked + PATIENCE:
            raise Enough(0)
