"""Functions of torch's that are replaced, as methods of tensors and under `torch` alike.

They are replaced by name instead of watched by a mode of torch's: a mode is of one thread, and
torch.compile, torch.func and programs have modes of their own, among which it would stand.
"""

from __future__ import annotations

import functools
import importlib
from types import BuiltinFunctionType, FunctionType
from typing import Any, Callable

# What stands for a function: called with the original and the arguments.
Wrap = Callable[..., Any]

# The functions that make torch's tables of its functions, and keep them.
_TABLES = {
    "torch.utils._device": ("_device_constructors",),
    "torch.overrides": (
        "get_ignored_functions", "get_testing_overrides", "get_overridable_functions",
        "_get_tensor_methods",
    ),
}  # fmt: skip


class Functions:
    def __init__(self, torch: Any) -> None:
        self.torch = torch
        # What stands for a function, by its owner and name, innermost first.
        self.waiting: dict[tuple[Any, str], list[Wrap]] = {}

    def replace(self, name: str, wrap: Wrap) -> None:
        """Replace a tensor's method, and the function of this name. Of several that replace one,
        the last is called first."""
        self.patch(self.torch.Tensor, name, wrap)
        # Some of these names are types there (torch.float), or a module (torch.cuda).
        if isinstance(getattr(self.torch, name, None), (BuiltinFunctionType, FunctionType)):
            self.patch(self.torch, name, wrap)

    def patch(self, owner: Any, name: str, wrap: Wrap) -> None:
        """Replace one function of `owner`, if it has it."""
        if hasattr(owner, name):
            self.waiting.setdefault((owner, name), []).append(wrap)

    def install(self) -> None:
        """Call once, after the others."""
        of_torch = [key for key in self.waiting if key[0] is self.torch]
        for key in self.waiting.keys() - of_torch:
            self._set(*key)
        _fill_tables()
        for key in of_torch:
            self._set(*key)

    def _set(self, owner: Any, name: str) -> None:
        original = getattr(owner, name)
        ours = original
        for wrap in self.waiting[owner, name]:
            ours = functools.partial(wrap, ours)
        compiling, tracing = self.torch.compiler.is_compiling, self.torch._C._is_tracing

        @functools.wraps(original)
        def call(*arguments: Any, **options: Any) -> Any:
            # What is compiled or traced keeps torch's own function.
            if compiling() or tracing():
                return original(*arguments, **options)
            return ours(*arguments, **options)

        if owner is self.torch:
            # Found by these names when it is pickled.
            call.__module__, call.__qualname__ = "torch", name
        if owner is not self.torch.Tensor:
            self._script(original, call)
        setattr(owner, name, call)

    def _script(self, original: Any, call: Any) -> None:
        """torch.jit.script finds its functions by identity."""
        try:
            builtins = self.torch.jit._builtins
            of = builtins._find_builtin(original)
            if of is not None:
                builtins._register_builtin(call, of)
        except (AttributeError, RuntimeError):
            pass


def _fill_tables() -> None:
    """Have torch make the tables of its functions, by which a device context knows torch.ones, say.
    Those who look in them have a method of a tensor as it is found by its name, and torch's own
    function where ours stands for one."""
    for module, names in _TABLES.items():
        of = importlib.import_module(module)
        for name in names:
            getattr(of, name, lambda: None)()
