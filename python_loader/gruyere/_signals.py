"""The ends by a signal that a program has chosen itself, and that are clean exits.

Such an end does not pass the handlers of `exit`, so that the process would count as killed. Python
ends a program that Ctrl-C has interrupted by SIGINT, once everything is finalised. Servers and
training programs that handle SIGTERM end by the same signal when they have shut down, so that their
parent sees it: they restore the default handler, and send it to themselves.
"""

from __future__ import annotations

import atexit
import functools
import os
import signal
import sys
import threading
from typing import Any, Callable

from ._native import library

_CLEAN = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def install() -> None:
    """Close the record before such an end. Called by enable(), once."""
    atexit.register(_at_exit)
    _before(signal, "raise_signal", lambda number: number)
    _before(os, "kill", lambda pid, number: number if pid == os.getpid() else 0)


def _at_exit() -> None:
    # The interpreter sets it for an exception that nobody caught, whatever prints that.
    if isinstance(getattr(sys, "last_value", None), KeyboardInterrupt):
        library.load().gruyere_close()


def _before(module: Any, name: str, signal_of: Callable[..., int]) -> None:
    """Close the record before a call by which this process sends itself a signal that ends it.
    `signal_of` returns the signal that a call sends to this process, or 0."""
    original: Callable[..., Any] = getattr(module, name)

    @functools.wraps(original)
    def sending(*arguments: Any) -> Any:
        if _is_clean_end(signal_of, arguments):
            library.load().gruyere_close()
        return original(*arguments)

    # Not that of the C module: by this name, pickle finds the function again.
    sending.__module__ = module.__name__
    setattr(module, name, sending)


def _is_clean_end(signal_of: Callable[..., int], arguments: tuple[Any, ...]) -> bool:
    try:
        number = signal_of(*arguments)
        return (
            number in _CLEAN
            and threading.current_thread() is threading.main_thread()
            and signal.getsignal(number) is signal.SIG_DFL
            # A blocked signal waits.
            and number not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
            # The kernel spares the first process of a container.
            and os.getpid() != 1
        )
    except (TypeError, ValueError):
        # Wrong arguments: the call itself says so.
        return False
