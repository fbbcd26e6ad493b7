"""The driver fails, once or for good, at the call and with the code that the test names."""

import sys

import torch

import gpu

call, nth, code, for_good = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
gpu.install()
torch.cuda.init()
assert gpu.phantom.phantom_fail(call.encode(), nth, code, for_good) == 0
kept, errors = [], []
for step in range(60):
    try:
        kept.append(torch.empty((step % 7 + 1) * (3 << 20), dtype=torch.uint8, device="cuda"))
    except RuntimeError as error:
        errors.append(f"{type(error).__name__}: {error}")
    if step % 3 == 0 and kept:
        kept.pop(0)
    assert gpu.library.gruyere_validate() == 0
gpu.phantom.phantom_clear_failures()
kept.clear()
survived = False
try:
    torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    survived = True
except RuntimeError:
    pass
assert gpu.library.gruyere_validate() == 0
gpu.report(errors=errors, survived=survived)
