"""Running an action when a module is first imported."""

from __future__ import annotations

import importlib.util
import sys
import threading

# `typing` and `importlib.abc` would take longer to import than the interpreter to start.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any, Callable, Optional


def when_imported(name: str, action: Callable[[ModuleType], None]) -> None:
    """Call `action` with the module `name` once it is imported, or at once if it is imported
    already. An exception from `action` propagates from the import, which then fails; a later
    import calls `action` again."""
    module = sys.modules.get(name)
    if module is not None:
        action(module)
    else:
        sys.meta_path.insert(0, _Watch(name, action))


class _Watch:
    """A finder that lets the other finders find the module and wraps its loader."""

    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
        self.name = name
        self.action = action
        # find_spec calls the other finders, which calls this one again, in the same thread.
        self.asking = threading.local()

    def find_spec(
        self, name: str, path: Any = None, target: Optional[ModuleType] = None
    ) -> Optional[ModuleSpec]:
        if name != self.name or getattr(self.asking, "now", False):
            return None
        self.asking.now = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.asking.now = False
        loader: Any = spec.loader if spec else None
        if loader is None or not hasattr(loader, "exec_module"):
            return spec
        original = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            # Restore the loader for later readers. The watch ends here and not earlier, because
            # callers often request only the spec.
            vars(loader).pop("exec_module", None)
            original(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                try:
                    self.action(module)
                except BaseException:
                    sys.meta_path.insert(0, self)
                    raise

        loader.exec_module = exec_module
        return spec
