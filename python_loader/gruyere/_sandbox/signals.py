"""Signals that end a command. As an exception they reach all that has to be ended and removed."""

from __future__ import annotations

import signal
import sys
from typing import Any, NoReturn

_ENDING = (signal.SIGTERM, signal.SIGHUP)


def exit_on_signals() -> None:
    """Have SIGTERM and SIGHUP exit this process, which ends the running programs and removes our
    files. Call in the main thread."""
    for number in _ENDING:
        # A signal that nohup made the process ignore stays ignored.
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _exit)


def _exit(number: int, _frame: Any) -> NoReturn:
    # A second one would interrupt the removal.
    for ending in (*_ENDING, signal.SIGINT):
        signal.signal(ending, signal.SIG_IGN)
    sys.exit(128 + number)
