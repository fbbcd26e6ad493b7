"""The program's own allocator settings, in a run whose allocator is given.

A program may set `PYTORCH_CUDA_ALLOC_CONF` before or after it imports torch, or call
`gruyere.enable()`. A run keeps the allocator that its row names, together with the program's other
settings (`max_split_size_mb` and the like), and the answer lists what was ignored.
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

# The settings that choose the allocator.
_CHOICE = re.compile(r"(?:^|,)\s*(?:backend|expandable_segments)\s*:[^,\]]*")


class Settings(MetaPathFinder):
    def __init__(self, allocator: str) -> None:
        self.own = TORCH_CONF[allocator]
        # The settings that replace the program's.
        self.settled = ""
        self.left_out: set[str] = set()
        """The settings of the program that are ignored."""

    def watch(self) -> None:
        """Install the hooks. Call before the program runs."""
        # torch's libraries read the backend when they are loaded.
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
        """The settings in `text` as they apply in this run."""
        rest = _CHOICE.sub("", text).strip(" ,")
        if rest != text.strip(" ,") and self.own not in text.split(","):
            self.left_out.add(text)
        return ",".join(filter(None, [self.own, rest]))

    def _settle(self) -> None:
        for name in VARIABLES:
            text = os.environ.get(name, "")
            if text not in ("", self.own, self.settled):
                self.settled = self.kept(text)
                # Both variables, because the one that torch reads depends on its version.
                os.environ.update(dict.fromkeys(VARIABLES, self.settled))
                return

    def _enable(self, *_: Any, **settings: Any) -> None:
        words = ", ".join(f"{key}={value!r}" for key, value in settings.items())
        self.left_out.add(f"gruyere.enable({words})")
