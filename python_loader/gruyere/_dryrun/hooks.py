"""Hooks for an analysed run. They observe which module runs, when backward begins, when optimisers
step, what each piece of memory belongs to, and which values are read from the device.

The hooks hold no tensor, run no operator and change no operator's result. They write their state
into torch's user metadata of the allocating thread, which torch records with each allocation, as
four numbers: mark, phase, module, place. The mark grows with each sighting, so a sighting ("this
address is a gradient") can be ordered between the allocations before and after it.

The hooks do nothing in a child that the program forks (a DataLoader worker), which has no CUDA.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Callable

from .floats import Floats, are_random
from .identity import ByIdentity, named_modules, named_tensors
from .lines import NOWHERE, Lines

# The phases. The last is a forward inside a backward, which recomputes what was not kept.
PROGRAM, BACKWARD, OPTIMIZER, RECOMPUTING = range(4)
# The kinds of memory with an owner. If a block is of two kinds, the first counts.
WEIGHTS, STATES, GRADIENTS = "weights", "optimizer states", "gradients"
WORKSPACES = "workspaces"

# The names that wrappers give the module inside.
_WRAPPERS = frozenset(("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))
# Methods by which a read of the device is named; all other reads are named "operator".
_READS = (
    "item", "tolist", "cpu", "to", "nonzero",
    "__bool__", "__int__", "__float__", "__index__", "__complex__",
)  # fmt: skip


class _Reader(threading.local):
    name = "operator"


@dataclass
class Seen:
    """The observations, as numbers and names."""

    names: list[str] = field(default_factory=lambda: [""])
    """Names of modules by number; 0 is none."""
    places: list[str] = field(default_factory=lambda: [""])
    """Lines of the program by number; 0 is none."""
    sightings: list[tuple[int, int, str, str]] = field(default_factory=list)
    """Mark, address, kind, and name of the parameter or buffer; sorted by mark."""
    backwards: list[int] = field(default_factory=list)
    """Marks at which a backward pass began."""
    steps: list[int] = field(default_factory=list)
    """Marks at which a step ended."""
    batches: list[int] = field(default_factory=list)
    """Marks at which a DataLoader gave a batch."""
    cleared: set[int] = field(default_factory=set)
    """Marks at which torch freed its workspaces and nothing else."""
    reads: list[tuple[int, str, str, str]] = field(default_factory=list)
    """Reads from the device: mark, line, function, and the line in the library that reads; sorted
    by mark, except for those of concurrent threads."""


class Hooks:
    def __init__(self, torch: Any, lines: Lines) -> None:
        self.torch = torch
        self.lines = lines
        self.seen = Seen()
        self.mark = 0
        self.phase = PROGRAM
        self.place = 0
        # The phases that running optimiser steps have interrupted.
        self.interrupted: list[int] = []
        # Modules whose forward is running, outermost first, and the one whose backward is running.
        self.running: list[int] = []
        self.backward_of = 0
        # The number of running forwards that began before the backward pass.
        self.outer = 0
        self.numbers: ByIdentity[int] = ByIdentity()
        # The latest parent of each module.
        self.owners: ByIdentity[weakref.ref[Any]] = ByIdentity()
        self.by_place: dict[str, int] = {"": 0}
        self.by_name: dict[str, int] = {"": 0}
        # By the id of the parameter or buffer.
        self.parameters: dict[int, tuple[weakref.ref[Any], str]] = {}
        # Outermost modules searched since the last step.
        self.fresh: set[int] = set()
        # Whether this process is a forked child.
        self.is_child = False
        self.tell_torch: Callable[[str], None] = lambda _: None
        self.reader = _Reader()
        self.floats = Floats(torch) if are_random() else None
        # Called from C, so it must be kept alive.
        self.listener = ctypes.CFUNCTYPE(None)(self._read)
        self.workspace_listener = ctypes.CFUNCTYPE(None, ctypes.c_size_t)(self._workspace)

    def install(self) -> None:
        """Install the hooks. Call once torch is imported, before it uses CUDA."""
        torch = self.torch
        os.register_at_fork(after_in_child=self._forked)
        tell = getattr(torch._C, "_cuda_setMemoryMetadata", None)
        if tell is not None:
            self.tell_torch = tell
        record = torch.cuda.memory._record_memory_history
        torch.cuda._lazy_call(lambda: self._begin_history(record))
        # If the program started or stopped a history, it would replace ours.
        torch.cuda.memory._record_memory_history = lambda *_, **__: None
        modules = torch.nn.modules.module
        modules.register_module_module_registration_hook(self._owned)
        modules.register_module_forward_pre_hook(self._enter)
        modules.register_module_forward_hook(self._leave, always_call=True)
        # torch.optim hides its submodules.
        optimizers = importlib.import_module("torch.optim.optimizer")
        optimizers.register_optimizer_step_pre_hook(self._before_step)
        optimizers.register_optimizer_step_post_hook(self._after_step)
        torch.autograd._engine_run_backward = self._backward(torch.autograd._engine_run_backward)
        for name in _READS:
            original = getattr(torch.Tensor, name, None)
            if original is not None:
                setattr(torch.Tensor, name, self._reading(name, original))
        # Operators also read by themselves: an index that is a mask must be counted. The stand-in
        # reports each copy to the host, on the thread that makes it.
        self._listen(self.listener, self.workspace_listener)
        # The interpreter exits before torch's threads end.
        atexit.register(self._listen, None, None)
        clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
        if clear is not None:
            torch._C._cuda_clearCublasWorkspaces = self._clearing(clear)

    def _forked(self) -> None:
        self.is_child = True

    def _begin_history(self, record: Callable[..., None]) -> None:
        if self.is_child:
            return
        record(enabled="all", context="alloc", stacks="python", max_entries=1 << 24)
        self.tell()

    def tell(self) -> None:
        """Write the current state into the metadata of coming allocations."""
        at = self.running[-1] if self.running else self.backward_of
        again = self.phase == BACKWARD and len(self.running) > self.outer
        phase = RECOMPUTING if again else self.phase
        self.tell_torch(f"{self.mark} {phase} {at} {self.place}")

    def next_mark(self) -> int:
        self.mark += 1
        self.tell()
        return self.mark

    def close(self) -> None:
        """Finish at the end of the program: torch frees its workspaces, which identifies them."""
        self._sight_modules()
        self.running.clear()
        self.phase, self.backward_of, self.place = PROGRAM, 0, 0
        clear = getattr(self.torch._C, "_cuda_clearCublasWorkspaces", None)
        if clear is not None:
            clear()

    def _clearing(self, clear: Callable[[], None]) -> Callable[[], None]:
        """Wrap the function that frees torch's workspaces, which some trainers call at their
        end."""

        def clearing() -> None:
            if self.is_child:
                clear()
                return
            self.seen.cleared.add(self.next_mark())
            clear()
            self.next_mark()

        return clearing

    def step_is_over(self) -> None:
        self._sight_modules()
        self.seen.steps.append(self.next_mark())
        self.fresh.clear()

    def batch_is_given(self) -> None:
        self.seen.batches.append(self.next_mark())

    # Modules.

    def _enter(self, module: Any, _arguments: Any) -> None:
        if self.is_child or self.torch.compiler.is_compiling():
            return
        if self.phase == OPTIMIZER:
            # An optimiser's step has no forward except its closure's: the last step did not finish.
            self.phase = PROGRAM
            self.interrupted.clear()
        if not self.running and id(module) not in self.fresh:
            self.fresh.add(id(module))
            self._look_through(module)
        number = self.numbers.get(module)
        if number is None:
            number = self.numbers[module] = self._number(type(module).__name__)
        self.running.append(number)
        self.tell()

    def _leave(self, module: Any, _arguments: Any, output: Any) -> None:
        if self.is_child or self.torch.compiler.is_compiling():
            return
        if self.running:
            number = self.running.pop()
            if self.phase == PROGRAM and self.torch.is_grad_enabled():
                self._mark_backward(output, number)
        self.tell()

    def _mark_backward(self, output: Any, number: int) -> None:
        """Note when backward enters this module, by hooks on the nodes of its output."""

        def entered(_gradients: Any) -> None:
            if self.is_child:
                return
            self.backward_of = number
            self.tell()

        for tensor in _tensors(self.torch, output, 2):
            node = tensor.grad_fn
            if node is not None:
                node.register_prehook(entered)

    def _look_through(self, root: Any) -> None:
        """Name the modules and parameters in `root`, an outermost running module, and sight its
        parameters and buffers."""
        if root not in self.numbers:
            self._name_variables()
        if root not in self.numbers:
            whole, seen = root, {id(root)}
            while (owner := self._owner(whole)) is not None and id(owner) not in seen:
                seen.add(id(owner))
                whole = owner
            self._name(whole, type(whole).__name__)
        mark = self.next_mark()
        own = {id(value) for _, value in named_tensors(root)}
        for key, (ref, name) in list(self.parameters.items()):
            value = ref()
            if value is None:
                del self.parameters[key]
            elif key in own:
                self._sight(mark, value, WEIGHTS, name)

    def _name_variables(self) -> None:
        """Name modules after global variables of the program. Prefer a whole module's variable to
        that of a part of it."""
        variables = {
            name: value
            for name, value in list(vars(sys.modules["__main__"]).items())
            if issubclass(type(value), self.torch.nn.Module) and not name.startswith("_")
        }
        parts = {
            id(part)
            for value in variables.values()
            for _, part in named_modules(value)
            if part is not value
        }
        for name, value in variables.items():
            if id(value) not in parts:
                self._name(value, name)

    def _sight_modules(self) -> None:
        """Sight the parameters of all modules, including those without a forward, such as averages
        of weights."""
        # issubclass(type(...)) instead of isinstance(), which objects can override.
        kind = self.torch.nn.Module
        modules = [
            value
            for value in gc.get_objects()
            # Skip modules under construction.
            if issubclass(type(value), kind) and {"_modules", "_parameters"} <= vars(value).keys()
        ]
        parts = {id(part) for module in modules for part in module._modules.values()}
        fresh = [value for value in modules if value not in self.numbers and id(value) not in parts]
        if fresh:
            self._name_variables()
        for module in fresh:
            if module not in self.numbers:
                self._name(module, type(module).__name__)
        mark = self.next_mark()
        for ref, name in list(self.parameters.values()):
            value = ref()
            if value is not None:
                self._sight(mark, value, WEIGHTS, name)

    def _owned(self, owner: Any, _name: str, module: Any) -> None:
        if module is not None and not self.is_child:
            self.owners[module] = weakref.ref(owner)

    def _owner(self, module: Any) -> Any:
        owner = self.owners.get(module)
        return owner() if owner is not None else None

    def _name(self, root: Any, name: str) -> None:
        for path, module in named_modules(root):
            self.numbers[module] = self._number(_joined(name, path))
        for path, value in named_tensors(root):
            self.parameters[id(value)] = (weakref.ref(value), _joined(name, path))

    def _number(self, name: str) -> int:
        if name not in self.by_name:
            self.by_name[name] = len(self.seen.names)
            self.seen.names.append(name)
        return self.by_name[name]

    # Backward and optimisers.

    def _backward(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def told(_gradients: Any) -> None:
            if not self.is_child:
                self.tell()

        def run_backward(outputs: Any, *arguments: Any, **options: Any) -> Any:
            if self.is_child:
                return run(outputs, *arguments, **options)
            before = self.phase, self.backward_of, self.place, self.outer
            self.phase, self.outer = BACKWARD, len(self.running)
            line = self.lines.of_stack(sys._getframe(1))
            if line != NOWHERE or before[0] != BACKWARD:
                # A backward inside another one (checkpointing) belongs to the line that called the
                # outer one.
                if line not in self.by_place:
                    self.by_place[line] = len(self.seen.places)
                    self.seen.places.append(line)
                self.place = self.by_place[line]
            self.seen.backwards.append(self.next_mark())
            # torch's metadata is per thread, and backward has threads of its own.
            nodes = [tensor.grad_fn for tensor in _tensors(self.torch, outputs, 1)]
            handles = [node.register_prehook(told) for node in nodes if node is not None]
            try:
                return run(outputs, *arguments, **options)
            finally:
                for handle in handles:
                    handle.remove()
                self.phase, self.backward_of, self.place, self.outer = before
                self._sight_gradients()

        return run_backward

    def _sight_gradients(self) -> None:
        mark = self.next_mark()
        for ref, name in list(self.parameters.values()):
            value = ref()
            if value is not None and value.grad is not None:
                self._sight(mark, value.grad, GRADIENTS, name)

    def _before_step(self, optimizer: Any, arguments: Any, options: Any) -> Any:
        if self.is_child:
            return None
        self._sight_optimizer(optimizer)
        self.interrupted.append(self.phase)
        self.phase = OPTIMIZER
        self.tell()
        # The closure does work of the program: forward and backward.
        if options.get("closure") is not None:
            return arguments, {**options, "closure": self._closure(options["closure"])}
        if len(arguments) > 1 and callable(arguments[1]):
            return (arguments[0], self._closure(arguments[1]), *arguments[2:]), options
        return None

    def _closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def of_the_program() -> Any:
            self.phase = PROGRAM
            self.tell()
            try:
                return closure()
            finally:
                self.phase = OPTIMIZER
                self.tell()

        return of_the_program

    def _after_step(self, optimizer: Any, _arguments: Any, _options: Any) -> None:
        if self.is_child:
            return
        # The interrupted phase is backward if a gradient's hook calls the optimiser.
        self.phase = self.interrupted.pop() if self.interrupted else PROGRAM
        self._sight_optimizer(optimizer)

    def _sight_optimizer(self, optimizer: Any) -> None:
        mark = self.next_mark()
        for group in optimizer.param_groups:
            for value in group["params"]:
                _, name = self.parameters.get(id(value), (None, ""))
                self._sight(mark, value, WEIGHTS, name)
                if value.grad is not None:
                    self._sight(mark, value.grad, GRADIENTS, name)
                # It is a defaultdict: a plain lookup would add an entry.
                state = optimizer.state.get(value) if value in optimizer.state else None
                for tensor in _tensors(self.torch, state, 3):
                    self._sight(mark, tensor, STATES, name)

    def _sight(self, mark: int, tensor: Any, kind: str, name: str) -> None:
        parts = _parts(self.torch, tensor)
        while True:
            try:
                part = next(parts, None)
                if part is None:
                    return
                if part.is_cuda:
                    address = part.untyped_storage().data_ptr()
                    self.seen.sightings.append((mark, address, kind, name))
            except Exception:
                # A tensor without memory of its own (fake, lazy, or a wrapper that hides it) may
                # raise any error. Observing must not make the program fail.
                continue

    # Reads.

    def _listen(self, *listeners: Any) -> None:
        library = ctypes.CDLL(None)
        for name, listener in zip(("phantom_on_host_read", "phantom_on_workspace"), listeners):
            tell = getattr(library, name, None)
            if tell is not None:
                tell(listener)

    def _workspace(self, address: int) -> None:
        """Called by the stand-in: the memory at `address` was given to cuBLAS. Since torch 2.15
        each call has its own."""
        if not self.is_child:
            self.seen.sightings.append((self.next_mark(), address, WORKSPACES, ""))

    def _reading(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        shown = name.strip("_")

        def read(tensor: Any, *arguments: Any, **options: Any) -> Any:
            if self.is_child or not tensor.is_cuda or self.torch.compiler.is_compiling():
                return original(tensor, *arguments, **options)
            before, self.reader.name = self.reader.name, shown
            try:
                found = original(tensor, *arguments, **options)
                if self.floats is not None and tensor.is_floating_point():
                    found = self.floats.ordinary(tensor, name, found)
                return found
            finally:
                self.reader.name = before

        read.__name__ = name
        return read

    def _read(self) -> None:
        """Called by the stand-in: this thread has copied from the device to the host."""
        if self.is_child:
            return
        frame = sys._getframe().f_back
        line, inside = self.lines.of_stack(frame), self.lines.inside_stack(frame)
        if line == NOWHERE and self.place:
            # A thread of autograd: use the line that called backward and waits for it.
            line = self.seen.places[self.place]
        self.seen.reads.append((self.next_mark(), line, self.reader.name, inside))


def _joined(name: str, path: str) -> str:
    parts = [part for part in path.split(".") if part and part not in _WRAPPERS]
    return ".".join([name, *parts])


def _tensors(torch: Any, value: Any, depth: int) -> Iterator[Any]:
    """The tensors in a module's output or an optimiser's state."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, dict):
        for part in value.values():
            yield from _tensors(torch, part, depth - 1)
    elif depth and isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(torch, part, depth - 1)
    elif depth and hasattr(value, "__dict__") and not isinstance(value, torch.nn.Module):
        yield from _tensors(torch, vars(value), depth - 1)


def _parts(torch: Any, tensor: Any) -> Iterator[Any]:
    """The tensor, or the tensors inside a wrapper (sharded or quantized), and tensors in its
    attributes (such as the scales of a quantized one)."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _parts(torch, getattr(tensor, name))
        return
    if tensor.layout == torch.sparse_coo:
        yield tensor._indices()
        yield tensor._values()
        return
    yield tensor
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        for value in vars(tensor).values():
            yield from _tensors(torch, value, 2)
