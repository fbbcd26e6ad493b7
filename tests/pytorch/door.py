"""The native door in programs of the tests: what they find in their environment, and how they
begin."""

from pathlib import Path

from conftest import GRUYERE, HERE, ROOT, SHIM, TARGET

CACHE = Path(SHIM["XDG_CACHE_HOME"])
# CUDA's headers, for what the tests themselves build against torch's.
TOOLKIT = TARGET / "cuda-toolkit" / "nvidia" / "cu13"

PRELUDE = """
import gc, json, os, sys
import torch, gpu, gruyere
gpu.install()
MIB = 1 << 20
def tensor(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")
def refused(function, *arguments, kind=RuntimeError):
    try:
        function(*arguments)
    except kind as error:
        return str(error)
    raise AssertionError(f"{function} was not refused")
"""


def settings(**others):
    path = f"{HERE / 'programs'}:{ROOT / 'python_loader'}"
    return {
        "PYTHONPATH": path,
        "GRUYERE_LIBRARY": GRUYERE,
        **SHIM,
    } | others


def through(phantom, program="", code=None, check=True, **others):
    """Runs a program, or `code`, through the native door."""
    ran = phantom.run(program, code=code and PRELUDE + code, allocator="door", **settings(**others))
    return ran.check() if check else ran
