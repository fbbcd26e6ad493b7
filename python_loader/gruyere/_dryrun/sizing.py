"""Whether the program sizes itself by its device: it asks how much memory there is, or limits
itself to a share of it, or handles the error where there is too little. On another GPU it would
request other amounts."""

from __future__ import annotations

import functools
import os
import re
import sys
from types import ModuleType
from typing import Any, Callable, Optional

from .lines import NOWHERE, Lines

# In the program's source.
_HANDLES = re.compile(r"OutOfMemoryError|[\"'][^\"']*out of memory")
# accelerate's search, which begins with the largest batch, and the setting by which transformers'
# trainer uses it, as far as the source alone tells.
_REDUCES = re.compile(r"^(?!\s*(?:from|import)\b).*find_executable_batch_size")
_IS_SET = re.compile(r"auto_find_batch_size[\"']?\s*[=:]\s*True")
_SETTING = "PYTORCH_CUDA_ALLOC_CONF"


class Sizing:
    def __init__(self) -> None:
        self.lines: Optional[Lines] = None
        self.pid = os.getpid()
        self.asked: Optional[str] = None
        """The first line that asked for the memory of the device."""
        self.fraction: Optional[float] = None
        self.limited: Optional[str] = None
        """The line that set the fraction."""
        self.reduces: Optional[str] = None
        """The first line at which a trainer began that tries smaller batches if one does not
        fit."""
        self.has_trainer = False
        """Whether a trainer has told whether it does."""

    def trains(self, trainer: Any, frame: Any) -> None:
        """A trainer of transformers begins, called by this frame."""
        does = getattr(getattr(trainer, "args", None), "auto_find_batch_size", None)
        if isinstance(does, bool) and os.getpid() == self.pid:
            self.has_trainer = True
            if does and self.reduces is None:
                self.reduces = self._line(frame)

    def watch(self, torch: ModuleType, lines: Lines) -> None:
        """Install the hooks. Call once torch is imported."""
        self.lines = lines
        cuda: Any = torch.cuda
        accelerator: Any = getattr(torch, "accelerator", None)
        for module in (cuda, cuda.memory):
            self._wrap(module, "mem_get_info", self._asking)
            self._wrap(module, "set_per_process_memory_fraction", self._limiting)
        for module in (accelerator, getattr(accelerator, "memory", None)):
            self._wrap(module, "get_memory_info", self._asking)
        kind: Any = getattr(torch._C, "_CudaDeviceProperties", None)
        total = vars(kind).get("total_memory") if kind is not None else None
        if total is not None:
            get = total.__get__

            def total_memory(properties: Any) -> Any:
                self._note(sys._getframe(1))
                return get(properties, type(properties))

            try:
                kind.total_memory = property(total_memory)
            except (AttributeError, TypeError):
                # This torch's class cannot be changed.
                pass

    def _wrap(self, module: Any, name: str, wrap: Callable[..., Any]) -> None:
        original = getattr(module, name, None)
        if original is not None and not hasattr(original, "_gruyere"):
            wrapped = wrap(original)
            wrapped._gruyere = True
            setattr(module, name, wrapped)

    def _asking(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def asking(*arguments: Any, **options: Any) -> Any:
            self._note(sys._getframe(1))
            return original(*arguments, **options)

        return asking

    def _limiting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def limiting(fraction: Any, *arguments: Any, **options: Any) -> Any:
            result = original(fraction, *arguments, **options)
            self.fraction = float(fraction)
            self.limited = self._line(sys._getframe(1))
            return result

        return limiting

    def _note(self, frame: Any) -> None:
        """The code of this frame asks. What torch asks for itself does not size the program."""
        by = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if self.asked is None and by not in ("torch", "gruyere") and os.getpid() == self.pid:
            self.asked = self._line(frame)

    def _line(self, frame: Any) -> str:
        return self.lines.of_stack(frame) if self.lines else NOWHERE

    def facts(self, torch: ModuleType) -> dict[str, Any]:
        """What was seen, as plain data."""
        get = getattr(torch.cuda, "get_per_process_memory_fraction", None)
        if self.fraction is None and get is not None:
            # Or the program's settings of the allocator have it.
            fraction = float(get(0))
            if fraction < 1:
                self.fraction, self.limited = fraction, _SETTING
        return {
            "asked": self.asked, "fraction": self.fraction, "limited": self.limited,
            "handles": self._first(_HANDLES), "reduces": self._reduces(),
        }  # fmt: skip

    def _reduces(self) -> Optional[str]:
        """A line at which the program tries smaller batches if one does not fit."""
        found = self.reduces or self._first(_REDUCES)
        return found if found is not None or self.has_trainer else self._first(_IS_SET)

    def _first(self, pattern: re.Pattern[str]) -> Optional[str]:
        """The first line of the program's source with this. One that names out-of-memory errors,
        say: where they occur, on a smaller device, it may go on with less."""
        for module in list(sys.modules.values()):
            file = getattr(module, "__file__", None)
            name = self.lines.name(file) if self.lines and isinstance(file, str) else None
            if name is None or file is None or not file.endswith(".py"):
                continue
            try:
                with open(file, encoding="utf-8", errors="replace") as source:
                    for number, line in enumerate(source, 1):
                        if pattern.search(line.partition("#")[0]):
                            return f"{name}:{number}"
            except OSError:
                continue
        return None


def asks(facts: dict[str, Any]) -> bool:
    """Whether the program of a run with these facts asked for the memory of its device."""
    return (facts.get("sizing") or {}).get("asked") is not None


def limit(facts: Optional[dict[str, Any]], memory: int, usable: int) -> Optional[int]:
    """The bytes to which the program limits itself on a device of this memory; None if it has
    more than the device leaves it."""
    fraction = (facts or {}).get("fraction")
    if fraction is None:
        return None
    allowed = int(fraction * memory)
    return allowed if allowed < usable else None


def sizes_itself(facts: Optional[dict[str, Any]], caught: int) -> Optional[dict[str, Any]]:
    """How the program sizes itself, for the report; None if it was not seen to."""
    told = facts or {}
    names = ("asked", "fraction", "limited", "handles", "reduces")
    found = {name: told.get(name) for name in names}
    if not caught and not any(value is not None for value in found.values()):
        return None
    return {**found, "caught": caught}
