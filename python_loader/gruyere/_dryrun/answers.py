"""Answers to questions that the program asks the device. The answers are known in any training that
goes well, and invented values would make the program take another path.

The report lists each question with its answer, so that users whose training differs can tell.
"""

from __future__ import annotations

import functools
import pickle
import threading
from collections import Counter
from types import ModuleType
from typing import Any, Callable

from .._imports import when_imported
from .computed import Computed
from .finite import Finite, Known
from .functions import Functions
from .indices import Indices
from .masks import Masks

INFINITE = "GradScaler: no gradient is infinite or NaN"
OVERFLOW = "DeepSpeed: no gradient and no norm of them is infinite or NaN"
LOSS = "transformers: no loss is infinite or NaN (the run sets logging_nan_inf_filter off)"
PACKED = "transformers: no row has several sequences packed into it"
FACTORED = "torch.linalg: every matrix could be factored"
GENERATED = "transformers: generate() goes on to its greatest length (max_new_tokens, max_length)"
PADDED = "transformers: some row is padded, so that a mask is made (the larger of the two)"
CAUSAL = "torch.nn.Transformer: a mask that was made on the device is causal"
OBJECTS = "torch.distributed: one rank gathers its own object (some bytes)"
PRINTED = "print: the digits of a tensor are found on the host, not on the device (some bytes)"


class Answers:
    def __init__(self) -> None:
        self.answered: Counter[str] = Counter()
        # Threads whose generate() has reached its greatest length.
        self.full: set[int] = set()

    def watch(self) -> None:
        """Install the hooks. Call before the modules are imported."""
        when_imported("torch", self._operators)
        when_imported("torch.amp.grad_scaler", self._scaler)
        when_imported("torch._tensor_str", self._words)
        when_imported("torch.nn.modules.transformer", self._causal)
        when_imported("torch.distributed.distributed_c10d", self._objects)
        when_imported("deepspeed.runtime.utils", self._overflows)
        for stage in ("stage_1_and_2", "stage3"):
            when_imported(f"deepspeed.runtime.zero.{stage}", self._overflows)
        when_imported("transformers.generation.stopping_criteria", self._lengths)
        when_imported("transformers.generation.utils", self._generation)
        when_imported("transformers.masking_utils", self._masks)
        when_imported("transformers.trainer", self._losses)

    def _operators(self, torch: ModuleType) -> None:
        # None if torch is not built for CUDA, and in the tests' fake torch.
        if getattr(getattr(torch, "version", None), "cuda", None) is None:
            return
        from torch.library import Library

        # The registrations last as long as this object.
        self.library = Library("aten", "IMPL")
        known, self.computed = Known(), Computed(self.answered)
        self.finite = Finite(self.answered, known, self.computed)
        self.masks = Masks(self.answered, known, self.computed)
        functions = Functions(torch)
        # What is known is written after what is made up of the same result.
        Indices(torch).watch(functions.replace)
        self.computed.watch(torch, functions)
        self.finite.watch(torch, functions, self.library)
        self.masks.watch(torch, functions, self.library)
        functions.install()
        self._linalg(self.library)

    def _linalg(self, library: Any) -> None:
        """torch.linalg: functions whose kernels may fail check whether they have."""

        def check(info: Any, _name: str, *, is_matrix: bool) -> None:
            # Allocates what the check itself would.
            info.any()
            self.answered[FACTORED] += 1

        library.impl("_linalg_check_errors", check, "CUDA")

    def _scaler(self, module: ModuleType) -> None:
        """GradScaler: a skipped step takes less memory than a step that is done."""

        def step(_scaler: Any, optimizer: Any, state: Any, *more: Any, **options: Any) -> Any:
            for found in state["found_inf_per_device"].values():
                found.item()
            self.answered[INFINITE] += 1
            return optimizer.step(*more, **options)

        scaler: Any = module.GradScaler
        scaler._maybe_opt_step = step

    def _words(self, module: ModuleType) -> None:
        """print: the number of digits is found by kernels on the nonzero values."""
        original: Any = vars(module)["_str"]

        @functools.wraps(original)
        def words(tensor: Any, **options: Any) -> str:
            # Other tensor types have their own text.
            if tensor.is_cuda and type(tensor).__name__ in ("Tensor", "Parameter"):
                self.answered[PRINTED] += 1
                tensor = tensor.detach().to("cpu")
            said: str = original(tensor, **options)
            return said

        vars(module)["_str"] = words

    def _causal(self, module: ModuleType) -> None:
        """torch.nn.Transformer: its attention with a causal mask takes another path."""
        of: Any = vars(module)
        original = of.get("_detect_is_causal_mask")
        if original is None:
            return

        @functools.wraps(original)
        def causal(mask: Any, is_causal: Any = None, size: Any = None) -> bool:
            # Call it anyway: the memory that it takes is part of the program.
            found = bool(original(mask, is_causal, size))
            if mask is None or is_causal is not None or not mask.is_cuda:
                return found
            length = mask.size(-2) if size is None else size
            if tuple(mask.shape) != (length, length):
                return found
            # What was copied from the host is read back as it was; what was made on the device is
            # invented, and has neither infinite values nor ones.
            values = mask.detach().to("cpu")
            if not bool((values if values.dtype == of["torch"].bool else values.isinf()).any()):
                self.answered[CAUSAL] += 1
                return True
            made = of["_generate_square_subsequent_mask"](length, dtype=values.dtype)
            return bool((values == made).all())

        of["_detect_is_causal_mask"] = causal

    def _objects(self, module: ModuleType) -> None:
        """all_gather_object: from torch 2.15 on a kernel finds the largest object's size."""
        if not hasattr(module, "all_gather_single"):
            return
        original: Any = vars(module)["all_gather_object"]

        @functools.wraps(original)
        def gather(objects: Any, obj: Any, group: Any = None, *more: Any, **options: Any) -> Any:
            of = vars(module)
            is_alone = of["get_world_size"](group) == 1
            if not is_alone or of["_get_object_coll_device"](group) != "cuda":
                return original(objects, obj, group, *more, **options)
            self.answered[OBJECTS] += 1
            # As the original does: the result is a copy.
            objects[0] = pickle.loads(pickle.dumps(obj))

        vars(module)["all_gather_object"] = gather

    def _overflows(self, module: ModuleType) -> None:
        """DeepSpeed: like a scaler, its optimisers check whether a gradient is infinite. Modules
        that import these functions by name do so after this."""
        for name in ("has_inf_or_nan", "is_invalid_grad_norm"):
            function = getattr(module, name, None)
            if function is not None and function.__module__ == module.__name__:
                vars(module)[name] = self._finite(function)
        for name in ("CheckOverflow", "DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3"):
            owner = getattr(module, name, None)
            for method in ("has_overflow", "check_using_norm"):
                if method in vars(owner or object):
                    setattr(owner, method, self._finite(getattr(owner, method)))

    def _finite(self, ask: Callable[..., Any]) -> Callable[..., bool]:
        @functools.wraps(ask)
        def asking(*arguments: Any, **options: Any) -> bool:
            # Allocates what the check itself would.
            ask(*arguments, **options)
            self.answered[OVERFLOW] += 1
            return False

        return asking

    def _losses(self, module: ModuleType) -> None:
        """transformers' trainer: leaves infinite losses out of the logged sum."""
        trainer: Any = module.Trainer
        original = trainer.train

        @functools.wraps(original)
        def train(this: Any, *arguments: Any, **options: Any) -> Any:
            if getattr(this.args, "logging_nan_inf_filter", False):
                this.args.logging_nan_inf_filter = False
                self.answered[LOSS] += 1
            return original(this, *arguments, **options)

        trainer.train = train

    def _lengths(self, module: ModuleType) -> None:
        """transformers' generate: the greatest length, which the host knows."""
        criteria: Any = module.MaxLengthCriteria
        original = criteria.__call__

        @functools.wraps(original)
        def call(this: Any, input_ids: Any, *more: Any, **options: Any) -> Any:
            if input_ids.shape[1] >= this.max_length:
                self.full.add(threading.get_ident())
            return original(this, input_ids, *more, **options)

        criteria.__call__ = call

    def _generation(self, module: ModuleType) -> None:
        """transformers' generate: whether all sequences have ended is read from the device."""
        mixin: Any = module.GenerationMixin
        original = getattr(mixin, "_has_unfinished_sequences", None)
        if original is None:
            return

        @functools.wraps(original)
        def has_unfinished(*arguments: Any, **options: Any) -> bool:
            # Call it anyway: ranks may meet in it.
            original(*arguments, **options)
            is_full = threading.get_ident() in self.full
            self.full.discard(threading.get_ident())
            self.answered[GENERATED] += is_full
            return not is_full

        mixin._has_unfinished_sequences = has_unfinished

    def _masks(self, module: ModuleType) -> None:
        """transformers' masks: both checks read results of kernels, namely counted positions and
        whether a mask is all true."""
        for name in ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa"):
            ignore = getattr(module, name, None)
            if ignore is not None:
                setattr(module, name, self._ignoring(ignore))
        name = "find_packed_sequence_indices"
        find = getattr(module, name, None)
        if find is None:
            return

        @functools.wraps(find)
        def found(position_ids: Any) -> Any:
            # Call it anyway: the memory that it takes is part of the program.
            find(position_ids)
            self.answered[PACKED] += 1
            return None

        setattr(module, name, found)

    def _ignoring(self, ignore: Callable[..., bool]) -> Callable[..., bool]:
        @functools.wraps(ignore)
        def ignoring(padding_mask: Any = None, *arguments: Any, **options: Any) -> bool:
            if padding_mask is None:
                return ignore(padding_mask, *arguments, **options)
            # Do not call it: what it checks next depends on the first answer. It takes some bytes.
            self.answered[PADDED] += 1
            return False

        return ignoring
