"""Which line of the program something happened at: the innermost frame that is neither a library's
nor Python's own."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path
from types import FrameType
from typing import Any, Optional

NOWHERE = "(libraries)"


class Lines:
    def __init__(self, folder: str) -> None:
        """Files below `folder` are named from there."""
        paths = sysconfig.get_paths()
        self.foreign = tuple(
            os.path.join(os.path.realpath(path), "")
            for path in {
                paths["stdlib"],
                paths["platstdlib"],
                paths["purelib"],
                paths["platlib"],
                str(Path(__file__).resolve().parent.parent),
            }
        )
        self.folder = os.path.join(os.path.realpath(folder), "")
        # By file as frames name it: how it is called here, or None for a library's.
        self.known: dict[str, Optional[str]] = {}

    def name(self, file: str) -> Optional[str]:
        """What a file of the program is called; None for one that is not the program's."""
        if file not in self.known:
            self.known[file] = self._name(file)
        return self.known[file]

    def _name(self, file: str) -> Optional[str]:
        if not file or file.startswith("<"):
            return None
        path = os.path.realpath(file)
        parts = path.split(os.sep)
        if path.startswith(self.foreign) or "site-packages" in parts or "dist-packages" in parts:
            return None
        return path[len(self.folder) :] if path.startswith(self.folder) else path

    def of_frames(self, frames: list[dict[str, Any]]) -> str:
        """Of a stack as torch's history tells it, innermost first."""
        for frame in frames:
            name = self.name(frame["filename"])
            if name is not None:
                return f"{name}:{frame['line']}"
        return NOWHERE

    def inside(self, frames: list[dict[str, Any]]) -> str:
        """The innermost frame of a library other than torch and this, as
        `transformers/trainer.py:1900`; "" where the program itself calls torch."""
        for frame in frames:
            file = frame["filename"]
            if self.name(file) is not None:
                return ""
            short = _of_package(file)
            if short and not short.startswith(("torch/", "gruyere/")):
                return f"{short}:{frame['line']}"
        return ""

    def inside_stack(self, frame: Optional[FrameType]) -> str:
        """The same of a running stack."""
        frames = []
        while frame is not None:
            frames.append({"filename": frame.f_code.co_filename, "line": frame.f_lineno})
            frame = frame.f_back
        return self.inside(frames)

    def of_stack(self, frame: Optional[FrameType]) -> str:
        """Of a running stack."""
        while frame is not None:
            name = self.name(frame.f_code.co_filename)
            if name is not None:
                return f"{name}:{frame.f_lineno}"
            frame = frame.f_back
        return NOWHERE


def _of_package(file: str) -> str:
    """A file's name below the folder in which packages are installed; "" where it is in none."""
    for folder in ("site-packages", "dist-packages"):
        _, found, short = file.rpartition(f"{os.sep}{folder}{os.sep}")
        if found:
            return short
    return ""
