"""Which line of the program something happened at: the innermost frame that is neither a library's
nor Python's own. The package of a module that is run is the program, installed or not."""

from __future__ import annotations

import importlib.util
import os
import sysconfig
from pathlib import Path
from types import FrameType
from typing import Any, Optional

NOWHERE = "(libraries)"


class Lines:
    def __init__(self, folder: str, module: Optional[str] = None) -> None:
        """Files below `folder` are named from there. `module`: what runs, where it is one."""
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
        self.own = () if module is None else _places(module)
        self.folder = os.path.join(os.path.realpath(folder), "")
        # By the file in a frame: its name here, or None for a library's.
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
        if self.own and path.startswith(self.own):
            return self._below(path)
        parts = path.split(os.sep)
        if path.startswith(self.foreign) or "site-packages" in parts or "dist-packages" in parts:
            return None
        return self._below(path)

    def _below(self, path: str) -> str:
        if path.startswith(self.folder):
            return path[len(self.folder) :]
        return _of_package(path) or path

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


def _places(module: str) -> tuple[str, ...]:
    """The folders of the package that a module is of, or its file where it is of none."""
    try:
        spec = importlib.util.find_spec(module.partition(".")[0])
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return ()
    if spec.submodule_search_locations is None:
        return (os.path.realpath(spec.origin),) if spec.origin else ()
    return tuple(os.path.join(os.path.realpath(i), "") for i in spec.submodule_search_locations)


def _of_package(file: str) -> str:
    """A file's name below the folder in which packages are installed; "" where it is in none."""
    for folder in ("site-packages", "dist-packages"):
        _, found, short = file.rpartition(f"{os.sep}{folder}{os.sep}")
        if found:
            return short
    return ""
