"""The ends of child processes that multiprocessing and torch.multiprocessing start.

They print or pass on their exceptions themselves, so that `sys.excepthook` sees none, and forked
ones leave by `os._exit`, past the handlers of `exit`: such a child would count as killed.
"""

from __future__ import annotations

import functools
import importlib
from multiprocessing import process, util
from typing import Any, Callable

from ._native import library
from ._torch import uncaught


def install() -> None:
    """Follow the ends of this process's children, and of this process if it is one."""
    if process.parent_process() is not None:
        _close_at_end()
    child: Any = process.BaseProcess
    child._bootstrap = _following(child._bootstrap)
    # The package has a function of the module's name.
    spawn: Any = importlib.import_module("torch.multiprocessing.spawn")
    spawn._wrap = _keeping(spawn._wrap)


def _following(bootstrap: Callable[..., int]) -> Callable[..., int]:
    """Wrap the main function of a child."""

    @functools.wraps(bootstrap)
    def wrapper(child: process.BaseProcess, *args: Any, **kwargs: Any) -> int:
        run = uncaught.keeping(child.run)

        def running() -> None:
            # Not before: a child begins by forgetting its parent's finalisers.
            _close_at_end()
            run()

        child.run = running  # type: ignore[method-assign]
        return bootstrap(child, *args, **kwargs)

    return wrapper


def _close_at_end() -> None:
    # The lowest priority runs last: other finalisers may still use the device.
    util.Finalize(None, _close, exitpriority=-1000)


def _close() -> None:
    library.load().gruyere_close()


def _keeping(wrap: Callable[..., None]) -> Callable[..., None]:
    """Wrap the function that runs what torch.multiprocessing.spawn was given. It is pickled by its
    name."""

    @functools.wraps(wrap)
    def wrapper(function: Callable[..., Any], *args: Any) -> None:
        wrap(uncaught.keeping(function), *args)

    return wrapper
