"""What the program says of the allocator by itself, where each run has been given one.

A program may set `PYTORCH_CUDA_ALLOC_CONF` before it imports torch, or after, or call
`gruyere.enable()`. A run keeps the allocator that it is named for, with the rest of the program's
settings (`max_split_size_mb` and the like), and the answer says so.
"""

from __future__ import annotations

import os
import re
import sys
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

import gruyere

from .._bench.runners import TORCH_CONF, VARIABLES

# The part that chooses the allocator.
_CHOICE = re.compile(r"(?:^|,)\s*(?:backend|expandable_segments)\s*:[^,\]]*")


class Settings(MetaPathFinder):
    def __init__(self, allocator: str) -> None:
        self.own = TORCH_CONF[allocator]
        # The settings in place of the program's words.
        self.settled = ""
        self.left_out: set[str] = set()
        """What of the program's does not hold."""

    def watch(self) -> None:
        """Before the program runs."""
        # torch's libraries read the backend as they are loaded.
        sys.meta_path.insert(0, self)
        vars(gruyere)["enable"] = self._enable

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torch":
            self._settle()

    def imported(self, torch: ModuleType) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        # torch reads the rest at its first allocation.
        torch.cuda._lazy_call(self._settle)
        original = getattr(torch.cuda.memory, "_set_allocator_settings", None)
        if original is not None:
            torch.cuda.memory._set_allocator_settings = lambda text: original(self.kept(text))

    def kept(self, text: str) -> str:
        """The settings as they hold in this run."""
        rest = _CHOICE.sub("", text).strip(" ,")
        if rest != text.strip(" ,") and self.own not in text.split(","):
            self.left_out.add(text)
        return ",".join(filter(None, [self.own, rest]))

    def _settle(self) -> None:
        for name in VARIABLES:
            text = os.environ.get(name, "")
            if text not in ("", self.own, self.settled):
                self.settled = self.kept(text)
                # Both variables: torch reads one of them, by version.
                os.environ.update(dict.fromkeys(VARIABLES, self.settled))
                return

    def _enable(self, *_: Any, **settings: Any) -> None:
        words = ", ".join(f"{key}={value!r}" for key, value in settings.items())
        self.left_out.add(f"gruyere.enable({words})")
