"""The line of the program in a stack: the innermost frame outside libraries and Python itself. If a
module is run, its package counts as the program, even if it is installed."""

from __future__ import annotations

import importlib.util
import os
import re
import sysconfig
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any, Optional

NOWHERE = "(libraries)"
# Names of the files into which torch_geometric writes the message passing of layers; those of a
# program's own modules lie in the folder for temporary files. As `is_generated` of the record's
# crate.
GENERATED = re.compile(r"torch_geometric\.|__main___")
GENERATED_FOR_OWN = re.compile(
    re.escape(tempfile.gettempdir()) + r"/[^/]+_(propagate|edge_updater)_"
)


class Lines:
    def __init__(self, folder: str, module: Optional[str] = None) -> None:
        """File names are relative to `folder` if they are below it. `module`: the module that is
        run, if the program is one."""
        paths = sysconfig.get_paths()
        self.foreign = tuple(
            os.path.join(os.path.realpath(path), "")
            for path in {
                paths["stdlib"],
                paths["platstdlib"],
                paths["purelib"],
                paths["platlib"],
                str(Path(__file__).resolve().parent.parent),
                *_caches(),
            }
        )
        self.own = () if module is None else _places(module)
        self.folder = os.path.join(os.path.realpath(folder), "")
        # For each file in a frame: its name, or None for a library's file.
        self.known: dict[str, Optional[str]] = {}

    def name(self, file: str) -> Optional[str]:
        """The name of a file of the program; None for any other file."""
        if file not in self.known:
            self.known[file] = self._name(file)
        return self.known[file]

    def _name(self, file: str) -> Optional[str]:
        if not file or file.startswith("<"):
            return None
        if GENERATED.match(os.path.basename(file)) or GENERATED_FOR_OWN.match(file):
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
        """The line of the program in a stack from torch's history, innermost frame first."""
        for frame in frames:
            name = self.name(frame["filename"])
            if name is not None:
                return f"{name}:{frame['line']}"
        return NOWHERE

    def inside(self, frames: list[dict[str, Any]]) -> str:
        """The innermost frame in a library other than torch and gruyere, such as
        `transformers/trainer.py:1900`; "" if the program itself calls torch."""
        for frame in frames:
            file = frame["filename"]
            if self.name(file) is not None:
                return ""
            short = _of_package(file)
            if short and not short.startswith(("torch/", "gruyere/")):
                return f"{short}:{frame['line']}"
        return ""

    def inside_stack(self, frame: Optional[FrameType]) -> str:
        """Like `inside`, for a running stack."""
        frames = []
        while frame is not None:
            frames.append({"filename": frame.f_code.co_filename, "line": frame.f_lineno})
            frame = frame.f_back
        return self.inside(frames)

    def of_stack(self, frame: Optional[FrameType]) -> str:
        """Like `of_frames`, for a running stack."""
        while frame is not None:
            name = self.name(frame.f_code.co_filename)
            if name is not None:
                return f"{name}:{frame.f_lineno}"
            frame = frame.f_back
        return NOWHERE


def _caches() -> list[str]:
    """The folders of code that torch.compile and Triton generate, which the sandbox names."""
    names = (os.environ.get(name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"))
    return [name for name in names if name]


def _places(module: str) -> tuple[str, ...]:
    """The folders of a module's package, or its file if it is not in a package."""
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
    """A file's name relative to the folder of installed packages; "" if it is not in one."""
    for folder in ("site-packages", "dist-packages"):
        _, found, short = file.rpartition(f"{os.sep}{folder}{os.sep}")
        if found:
            return short
    return ""
