"""Searches for hyperparameters, which train again and again in one process: a run that ends after
its steps has made those of the first trials alone, and others may be larger."""

from __future__ import annotations

from types import FrameType
from typing import Any, Optional

from .lines import Lines

# The modules that call the program's training, by their beginning.
_SEARCHES = {
    "optuna.study.": "optuna",
    "hyperopt.": "hyperopt",
    "skopt.": "skopt",
    "bayes_opt.": "bayes_opt",
    "wandb.agents.": "wandb",
}


def trials(frame: Optional[FrameType], lines: Lines) -> Optional[dict[str, Any]]:
    """The search that has called what runs in this stack: the library, and the program's line that
    began it (none if the trial has a thread of its own). None if there is no search."""
    while frame is not None:
        module = f"{frame.f_globals.get('__name__', '')}."
        for begin, library in _SEARCHES.items():
            if module.startswith(begin):
                return {"library": library, "line": lines.of_stack(frame)}
        frame = frame.f_back
    return None
