"""What PyTorch's own tests are not asked on the stand-in GPU: what its kernels compute. They do
nothing, so a sum, a product, a random number is whatever the memory held before.

`leave_out()` takes exactly this away:

- from `assertEqual` (and `torch.testing.assert_close`), the values of two tensors of which one is
  on a CUDA device and which are of a floating or a complex type. Their shapes, types, layouts and
  devices are still compared;
- from both, a number that `item()` or `tolist()` has read from a CUDA tensor (a sum, mostly);
- from `assertTrue` and `assertFalse`, a CUDA tensor by itself (`(tensor == 1).all()`).

Everything else is compared as it stands: Python's own numbers and texts, tensors of the CPU, CUDA
tensors of integers.
"""

import torch
from torch.testing import _comparison
from torch.testing._internal.common_utils import RelaxedNumberPair, TestCase


class ComputedFloat(float):
    """Was read from a CUDA tensor."""


class ComputedInt(int):
    """Was read from a CUDA tensor."""


MARKS = {float: ComputedFloat, int: ComputedInt}


def leave_out():
    for pair in (_comparison.NumberPair, RelaxedNumberPair):
        for plain, computed in MARKS.items():
            pair._TYPE_TO_DTYPE[computed] = pair._TYPE_TO_DTYPE[plain]
    for pair in (_comparison.TensorLikePair, _comparison.NumberPair):
        pair.compare = without_values(pair.compare)
    for reader in ("item", "tolist"):
        setattr(torch.Tensor, reader, marked(getattr(torch.Tensor, reader)))
    for check in ("assertTrue", "assertFalse"):
        setattr(TestCase, check, of_the_host(getattr(TestCase, check)))


def is_computed(thing):
    if isinstance(thing, torch.Tensor):
        return thing.is_cuda and (thing.dtype.is_floating_point or thing.dtype.is_complex)
    return type(thing) in MARKS.values()


def without_values(compare):
    def compared(pair):
        one, other = pair.actual, pair.expected
        if not (is_computed(one) or is_computed(other)):
            compare(pair)
        elif isinstance(pair, _comparison.TensorLikePair):
            pair._compare_attributes(one, other)

    return compared


def marked(read):
    def reading(tensor):
        found = read(tensor)
        return mark(found) if tensor.is_cuda else found

    return reading


def mark(found):
    if isinstance(found, list):
        return [mark(part) for part in found]
    return MARKS.get(type(found), lambda number: number)(found)


def of_the_host(check):
    def checked(case, found, *arguments, **named):
        if not (isinstance(found, torch.Tensor) and found.is_cuda):
            check(case, found, *arguments, **named)

    return checked
