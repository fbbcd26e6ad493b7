"""What every program here begins with: `import recorder`. It puts an allocator of its own in place
(recorder.c) that notes each request. `step()` marks the end of a step."""

import atexit
import ctypes
import os
import random
import sys
from pathlib import Path

import torch

# torch 2.15 may abort where a program ends close behind a backward (docs/pytorch.md).
sys.path.append(str(Path(__file__).parents[3] / "python_loader" / "gruyere" / "_torch"))
import backward_end  # noqa: E402

sys.path.pop()
atexit.register(backward_end.wait)

torch.manual_seed(1)
draw = random.Random(1)
# The stand-in's cuDNN serves convolutions and recurrent networks; not attention.
torch.backends.cuda.enable_cudnn_sdp(False)

_library = ctypes.CDLL(os.environ["GRUYERE_RECORDER"])


def _address(name):
    return ctypes.cast(getattr(_library, f"recorder_{name}"), ctypes.c_void_p).value


_allocator = torch._C._cuda_customAllocator(_address("malloc"), _address("free"))
_allocator.set_record_stream_fn(_address("record_stream"))
torch._C._cuda_changeCurrentAllocator(_allocator)


def mark(text):
    """A line of the trace that says something of the program."""
    _library.recorder_mark(text.encode())


def step():
    """A step or a request is done."""
    mark("step")


def steps(count):
    """The numbers of a program's steps: `count`, or as many times that as `--longer` says."""
    return range(count * int(os.environ.get("GRUYERE_RECORDER_LONGER", "1")))


def blank(*shape, high=1000, dtype=torch.long):
    """Tokens or pictures as a loader hands them over: made on the host, copied."""
    if dtype == torch.long:
        return torch.randint(high, shape).cuda()
    return torch.zeros(shape, dtype=dtype).cuda()
