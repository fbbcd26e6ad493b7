"""What the host knows of tensors on the device: values that it has copied there, constants that
were made there, and what is computed from such values alone. The kernels that would compute it do
nothing on the stand-in, so the host computes it and writes it into the stand-in's memory, as they
would have. Whoever reads it there, torch's C++ included, reads what a GPU would give.

The stand-in knows which of its memory the host has written, until the memory is another tensor's.
What kernels write is unknown there: a tensor is known while its version is that at which all that
is known of its memory was written. Views share memory and versions, so they need no care. No tensor
is kept, nor is anything allocated on the device.

Only small values are computed: those that decide how a program goes on are labels, masks, lengths,
boxes. Of other tensors no more is looked at than their size.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
from collections import Counter
from typing import Any, Callable, Optional

from .._imports import when_imported
from .functions import Functions
from .identity import ByIdentity

KNOWN = "values that the host has copied to the device, or that follow from such: computed there"

# The largest tensor that is computed: tokens of 64 rows of 8,192, the anchors of a detector. It
# takes the host a millisecond or two.
_MOST = 4 << 20
# The largest tensor of floats that is copied from the host, or made of a constant: above are
# images, weights, and states of optimisers. As much of any type is copied on the stand-in.
_SMALL = 64 << 10

# Functions whose result is that of the same function on the host. None draws random numbers, and
# none has rounding of its own (exp, softmax, products of matrices), but for powers and for the
# order of a sum.
_PURE = """
    eq ne lt le gt ge __eq__ __ne__ __lt__ __le__ __gt__ __ge__ isin
    greater greater_equal less less_equal not_equal isnan isinf isfinite isposinf isneginf
    add sub subtract rsub mul multiply div divide true_divide floor_divide remainder fmod pow square
    __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __rdiv__ __div__
    __floordiv__ __rfloordiv__ __mod__ __rmod__ __pow__ __rpow__ __neg__ __pos__ __abs__
    neg negative abs absolute sign floor ceil round trunc frac sqrt reciprocal
    maximum minimum fmax fmin clamp clip clamp_min clamp_max where masked_fill
    logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not
    __and__ __rand__ __or__ __ror__ __xor__ __rxor__ __invert__ __lshift__ __rshift__
    any all _is_all_true _is_any_true sum nansum prod mean max min amax amin aminmax argmax argmin
    count_nonzero cumsum cumprod cummax cummin diff sort argsort searchsorted bucketize
    tril triu diag diagonal trace index_select gather take take_along_dim roll flip
    scatter_add index_add index_fill masked_scatter
    clone contiguous reshape flatten ravel repeat tile cat concat concatenate stack hstack vstack
    dstack __getitem__ masked_select
""".split()  # fmt: skip
# Those whose result has the values of the tensor itself, perhaps of another type.
_SAME = """
    to cuda type type_as bool char byte short int long half bfloat16 float double
""".split()  # fmt: skip
# Functions whose answer is not a tensor.
_ANSWERS = ("equal", "allclose", "is_nonzero")
# Functions that write to their first argument what is computed from all.
_WRITE = """
    add_ sub_ subtract_ mul_ multiply_ div_ divide_ true_divide_ floor_divide_ remainder_ pow_
    __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ __iand__ __ior__ __ixor__
    neg_ abs_ clamp_ clip_ clamp_min_ clamp_max_ floor_ ceil_ round_ trunc_
    logical_and_ logical_or_ logical_xor_ logical_not_ bitwise_and_ bitwise_or_ bitwise_not_
    masked_fill_ index_fill_ index_add_ scatter_add_ masked_scatter_ __setitem__ fill_diagonal_
    cumsum_ tril_ triu_
""".split()  # fmt: skip
# Those that write it all, whatever was there.
_OVERWRITE = ("copy_", "fill_", "zero_")
# Functions that make constants: the number of the argument that is the constant, or the constant.
_CONSTANTS: dict[str, tuple[Optional[int], Any]] = {
    "zeros": (None, 0), "zeros_like": (None, 0), "new_zeros": (None, 0),
    "ones": (None, 1), "ones_like": (None, 1), "new_ones": (None, 1),
    "full": (1, None), "full_like": (1, None), "new_full": (2, None),
}  # fmt: skip
# Other functions that make tensors from numbers.
_MADE = ("arange", "eye", "tril_indices", "triu_indices", "linspace")
# Functions that write without counting versions: the places of what they write, else all.
_UNCOUNTED = {
    "batch_norm": (3, 5), "native_batch_norm": (3, 5), "cudnn_batch_norm": (3, 5),
    "miopen_batch_norm": (3, 5), "batch_norm_gather_stats": (3, 5),
    "batch_norm_gather_stats_with_counts": (3, 5),
    "fused_moving_avg_obs_fake_quant": (0, None), "_fused_moving_avg_obs_fq_helper": (0, None),
    "_foreach_zero_": (0, None), "_amp_foreach_non_finite_check_and_unscale_": (0, None),
    "_amp_update_scale_": (0, None),
}  # fmt: skip
# A version that no tensor has.
_NEVER = -1


class Computed:
    def __init__(self, answered: Counter[str]) -> None:
        self.answered = answered
        # The version of a storage's tensors at which what the stand-in knows of it is right; 0, as
        # of a tensor that was just made, where there is none.
        self.versions: ByIdentity[int] = ByIdentity()
        # Whether the program has captured a graph, whose replays write to memory unseen.
        self.is_captured = False
        library = ctypes.CDLL(None)
        self.has = getattr(library, "phantom_is_known", None)
        self.write = getattr(library, "phantom_written", None)
        for function in (self.has, self.write):
            if function is not None:
                function.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
        if self.write is not None:
            self.write.restype = None

    def watch(self, torch: Any, functions: Functions) -> None:
        """Replace torch's functions."""
        self.torch = torch
        # What a graph captures is run later.
        self.is_capturing = torch.cuda.is_current_stream_capturing
        self.kind = torch.Tensor
        self.plain = (torch.Tensor, torch.nn.Parameter)
        if self.has is None or self.write is None or not os.environ.get("PHANTOM_VALUES"):
            # Not on the stand-in, or nothing is made up there.
            return
        ways: list[tuple[Any, Callable[..., Any]]] = [
            (_PURE, self._pure), (_SAME, self._same),
            (_ANSWERS, self._answer), (_WRITE, self._writing), (_OVERWRITE, self._overwriting),
            (_MADE, self._made),
        ]  # fmt: skip
        for names, wrap in ways:
            for name in names:
                functions.replace(name, wrap)
        for name, (place, constant) in _CONSTANTS.items():
            functions.replace(name, self._constant(place, constant))
        for name, (start, end) in _UNCOUNTED.items():
            functions.replace(name, self._uncounted(start, end))
        functions.patch(torch._C._nn, "pad", self._pure)
        for name in dir(torch):
            if name.startswith("_fused_") and name.endswith("_"):
                functions.replace(name, self._uncounted(0, None))
        when_imported("triton.runtime.jit", self._watch_triton)
        # torch.optim hides it.
        optimizers = importlib.import_module("torch.optim.optimizer")
        optimizers.register_optimizer_step_post_hook(self._stepped)
        functions.patch(torch.cuda.CUDAGraph, "capture_begin", self._capture)

    # What is known.

    def knows(self, tensor: Any) -> bool:
        """Whether all values of a tensor on the device are known. What is trained is not for long,
        and not worth a look."""
        return not tensor.requires_grad and self._has_all(tensor)

    def _has_all(self, tensor: Any) -> bool:
        try:
            if type(tensor) not in self.plain or tensor.nbytes > _MOST or self.has is None:
                return False
            # Most tensors are not known to their first byte.
            address = tensor.data_ptr()
            if address and not self.has(address, 1):
                return False
            version = self.versions.get(tensor.untyped_storage()) or 0
            if tensor._version != version or tensor.is_conj() or tensor.is_neg():
                return False
            span = tensor.nbytes if tensor.is_contiguous() else _span(tensor)
            return span == 0 or bool(self.has(address, span))
        except (RuntimeError, NotImplementedError):
            # Tensors made in inference mode have no version, and some have no memory.
            return False

    def over(self, tensor: Any) -> Any:
        """A tensor on the host that has the memory of a tensor on the device."""
        span = _span(tensor)
        if span == 0:
            return self.torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        memory = (ctypes.c_char * span).from_address(tensor.data_ptr())
        flat = self.torch.frombuffer(memory, dtype=tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride())

    def places(self, mask: Any) -> Optional[Any]:
        """Where a mask is not zero, on the host, a row each; None if that is not known."""
        if not self.knows(mask):
            return None
        with self._aside():
            return self.over(mask).nonzero()

    def set(self, result: Any, value: Any) -> None:
        """`value`, a tensor or a number, is what a kernel would have written to `result`."""
        if self._may_be_written(result) and not self.is_capturing():
            with self._aside():
                self._put(result, value)
            self._is_written(result)

    def _are_known(self, values: Any) -> Optional[bool]:
        """Whether all tensors among the values are known. None if none is on the device."""
        on_device = None
        for value in values:
            if isinstance(value, self.torch.Tensor):
                if value.is_cuda:
                    if not self.knows(value):
                        return False
                    on_device = True
                elif type(value) not in self.plain or _bytes(value) > _MOST:
                    return False
            elif isinstance(value, (list, tuple)):
                of = self._are_known(value)
                if of is False:
                    return False
                on_device = on_device or of
        return on_device

    def _on_host(self, value: Any) -> Any:
        """The value with tensors on the host for those on the device, which are known."""
        if isinstance(value, self.torch.Tensor):
            return self.over(value) if value.is_cuda else value.detach()
        if type(value) in (list, tuple):
            return type(value)(map(self._on_host, value))
        return value

    # What becomes known.

    def _aside(self) -> contextlib.ExitStack:
        """No mode of the program's, nor autograd, sees what is done on the host."""
        stack, of = contextlib.ExitStack(), self.torch._C
        for guard in (of.DisableTorchFunction(), of._DisableTorchDispatch(), self.torch.no_grad()):
            stack.enter_context(guard)
        return stack

    def _store(self, result: Any, original: Any, arguments: Any, options: dict[str, Any]) -> None:
        """Compute on the host what `original` would have computed in `result`."""
        results = result if isinstance(result, (list, tuple)) else [result]
        made = [one for one in results if isinstance(one, self.torch.Tensor) and one.is_cuda]
        # A view of what is known is known, and so is a copy from the host.
        made = [one for one in made if not self.knows(one)]
        if not made or not all(map(self._may_be_written, made)) or self.is_capturing():
            return
        with self._aside():
            try:
                options = {name: self._on_host(value) for name, value in options.items()}
                found = original(*map(self._on_host, arguments), **options)
                founds = found if isinstance(found, (list, tuple)) else [found]
                for one, value in zip(results, founds):
                    if any(one is other for other in made):
                        self._keep(one, value)
            except Exception:
                # Not on the host, or not with these values: unknown as before.
                return

    def _may_be_written(self, result: Any) -> bool:
        """Whether values can be written to a result: all of its memory, and none of another's."""
        try:
            return (
                type(result) is self.torch.Tensor
                and result.nbytes == _span(result) == result.untyped_storage().nbytes()
                and result.nbytes <= _MOST
                and result._version >= 0
            )
        except (RuntimeError, NotImplementedError):
            return False

    def _keep(self, result: Any, value: Any) -> None:
        # Another type has other rules of rounding.
        if value.shape == result.shape and value.dtype == result.dtype:
            self.over(result).copy_(value)
            self._is_written(result)

    def _put(self, tensor: Any, value: Any) -> None:
        memory = self.over(tensor)
        memory.copy_(value) if self.torch.is_tensor(value) else memory.fill_(value)

    def _is_written(self, tensor: Any) -> None:
        """The host has written all memory of a tensor's storage."""
        assert self.write is not None
        self.write(tensor.data_ptr(), tensor.nbytes)
        self._set_version(tensor.untyped_storage(), tensor._version)

    def _set_version(self, storage: Any, version: int) -> None:
        if version or storage in self.versions:
            self.versions[storage] = version

    def forget(self, tensor: Any) -> None:
        """Nothing is known of a tensor's memory any more, by whatever tensor it is read."""
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):
            return
        if self.versions.get(storage) != _NEVER:
            self.versions[storage] = _NEVER

    def has_forgotten(self, tensor: Any) -> bool:
        """Whether a tensor's memory may have been written to without its version telling."""
        try:
            return self.versions.get(tensor.untyped_storage()) == _NEVER
        except (RuntimeError, NotImplementedError):
            return False

    # Functions that make another tensor.

    def _pure(self, original: Any, *arguments: Any, **options: Any) -> Any:
        if arguments and type(arguments[0]) is self.kind and arguments[0].requires_grad:
            # Most calls: of activations in a forward that trains.
            return original(*arguments, **options)
        are_known = self._are_known(arguments)
        if are_known is not False and options:
            of = self._are_known(options.values())
            are_known = of if of is False else are_known or of
        result = original(*arguments, **options)
        if are_known and "out" not in options:
            self._store(result, original, arguments, options)
        return result

    def _same(self, original: Any, *arguments: Any, **options: Any) -> Any:
        of: Any = arguments[0] if arguments else None
        if not self.torch.is_tensor(of):
            return original(*arguments, **options)
        is_known = self._is_small(of) if not of.is_cuda else self.knows(of)
        result = original(*arguments, **options)
        if result is of or not getattr(result, "is_cuda", False):
            return result
        if is_known:
            dtype = result.dtype
            self._store(result, _converted, (of, dtype), {})
        return result

    def _is_small(self, tensor: Any) -> bool:
        """Whether a tensor that was made on the host, or of a constant, becomes known: ids, labels
        and masks, also those that the stand-in does not copy for their size."""
        of_numbers = tensor.is_floating_point() or tensor.is_complex()
        most = _SMALL if of_numbers else _MOST
        return type(tensor) in self.plain and _bytes(tensor) <= most

    def _answer(self, original: Any, *arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        if isinstance(result, bool) and self._are_known(arguments):
            with self._aside():
                self.answered[KNOWN] += 1
                return original(*map(self._on_host, arguments), **options)
        return result

    def _made(self, original: Any, *arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        if getattr(result, "is_cuda", False) and "out" not in options:
            if self._are_known((*arguments, *options.values())) is not False:
                self._store(result, original, arguments, {**options, "device": "cpu"})
        return result

    def _constant(self, place: Optional[int], constant: Any) -> Callable[..., Any]:
        def call(original: Any, *arguments: Any, **options: Any) -> Any:
            result = original(*arguments, **options)
            if not getattr(result, "is_cuda", False) or "out" in options:
                return result
            value = constant
            if place is not None:
                value = options.get("fill_value", (*arguments[place:], None)[0])
            if isinstance(value, (bool, int, float)) and self._is_small(result):
                self.set(result, value)
            return result

        return call

    # Functions that write to a tensor.

    def _writing(self, original: Any, *arguments: Any, **options: Any) -> Any:
        if not arguments or not getattr(arguments[0], "is_cuda", False):
            return original(*arguments, **options)
        target = arguments[0]
        is_index = original.__name__ == "__setitem__"
        was_known = self._has_all(target)
        are_known = was_known and self._are_known((*arguments, *options.values()))
        result = original(*arguments, **options)
        if are_known and not self.is_captured and not self.is_capturing():
            with self._aside():
                try:
                    hosts = [*map(self._on_host, arguments)]
                    original(*hosts, **{name: self._on_host(one) for name, one in options.items()})
                    is_sure = not is_index or _is_assigned(self.torch, *hosts[:3])
                except Exception:
                    is_sure = False
            if is_sure:
                self._set_version(target.untyped_storage(), target._version)
            else:
                self.forget(target)
        elif was_known:
            # Its version may be one that others of this memory do not count (`.data`).
            self.forget(target)
        return result

    def _overwriting(self, original: Any, *arguments: Any, **options: Any) -> Any:
        target: Any = arguments[0] if arguments else None
        if not getattr(target, "is_cuda", False) or type(target) not in self.plain:
            return original(*arguments, **options)
        value: Any = next(iter((*arguments[1:], *options.values())), 0)
        is_tensor, was_known = self.torch.is_tensor(value), self._has_all(target)
        if is_tensor and value.is_cuda:
            is_known = self.knows(value)
        else:
            is_known = self._is_small(value if is_tensor else target)
        result = original(*arguments, **options)
        is_whole = self._may_be_written(target)
        if not is_known or self.is_captured or not (was_known or is_whole) or self.is_capturing():
            if was_known:
                self.forget(target)
        else:
            try:
                with self._aside():
                    of = self._on_host(value)
                    self._put(target, _converted(of, target.dtype) if is_tensor else of)
            except Exception:
                self.forget(target)
                return result
            if is_whole:
                self._is_written(target)
            else:
                self._set_version(target.untyped_storage(), target._version)
        return result

    def _uncounted(self, start: int, end: Optional[int]) -> Callable[..., Any]:
        def call(original: Any, *arguments: Any, **options: Any) -> Any:
            result = original(*arguments, **options)
            for value in (*arguments[start:end], *options.values()):
                for one in value if isinstance(value, (list, tuple)) else (value,):
                    if getattr(one, "is_cuda", False):
                        self.forget(one)
            return result

        return call

    def _stepped(self, optimizer: Any, _arguments: Any, _options: Any) -> None:
        # Its parameters are read by `.data` too, which counts no versions.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.is_cuda:
                    self.forget(parameter)

    def _watch_triton(self, jit: Any) -> None:
        # Its kernels count no versions of what they write.
        original, forget = jit.JITFunction.run, self._uncounted(0, None)

        @functools.wraps(original)
        def run(*arguments: Any, **options: Any) -> Any:
            return forget(original, *arguments, **options)

        jit.JITFunction.run = run

    def _capture(self, original: Any, *arguments: Any, **options: Any) -> Any:
        # What it captures may be run at any time from now on, so what the host has written in
        # place (the inputs of graphs) is not known any more.
        self.is_captured = True
        for number, (ref, version) in list(self.versions.known.items()):
            if version:
                self.versions.known[number] = ref, _NEVER
        return original(*arguments, **options)


def _converted(value: Any, dtype: Any) -> Any:
    """The value in another type. What an integer cannot hold is any number, one on a CPU and
    another one on a GPU."""
    found = value.to(dtype)
    if value.is_floating_point() and not found.is_floating_point() and str(dtype) != "torch.bool":
        if not bool((found.to(value.dtype) == value.trunc()).all()):
            raise ValueError
    return found


def _is_assigned(torch: Any, target: Any, index: Any, value: Any) -> bool:
    """Whether an assignment by an index has one result: an index may name an element twice, and
    then any of its values may be the last."""
    if not torch.is_tensor(value) or value.numel() < 2:
        return True
    found = target[index]
    return bool(torch.equal(found, value.to(found.dtype).expand_as(found)))


def _bytes(tensor: Any) -> int:
    # Sparse ones have no `nbytes`.
    return int(tensor.numel() * tensor.element_size())


def _span(tensor: Any) -> int:
    """The bytes from the first element of a tensor to its last."""
    shape = tensor.shape
    if 0 in shape:
        return 0
    last = sum((size - 1) * step for size, step in zip(shape, tensor.stride()))
    return int((last + 1) * tensor.element_size())
