"""What programs that know nothing of the tests report: Python runs this file at start because the
tests put its folder on PYTHONPATH. Children inherit it.

The program's last state of memory is written to $GRUYERE_TEST_REPORTS/PID.json at exit, where it
has imported torch. Nothing here puts Gruyère in: that is the launch line's doing.
"""

import atexit
import gc
import importlib.abc
import importlib.util
import json
import os
import sys


class AfterTorch(importlib.abc.MetaPathFinder):
    """Runs `prepare` when torch has been imported."""

    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        # Whoever else waits for torch has its turn too.
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            prepare(module)

        spec.loader.exec_module = exec_module
        return spec


def prepare(torch):
    # A child that multiprocessing forked is no program of its own, and ends without exit handlers.
    atexit.register(report, torch, os.getpid())


def report(torch, pid):
    """What is held and was held, by the allocator's word and by the phantom's, with everything that
    Python can drop dropped."""
    if os.getpid() != pid or not torch.cuda.is_initialized():
        return
    import ctypes

    gc.collect()
    phantom = ctypes.CDLL(os.environ["GRUYERE_TEST_PHANTOM"])
    devices = []
    library = in_use()
    for device in range(torch.cuda.device_count()):
        held = [ctypes.c_uint64(function(device)).value for function in counters(phantom)]
        torch.cuda.synchronize(device)
        numbers = {"physical": held[0], "physical_peak": held[1]}
        if library is None:
            numbers |= {
                "allocator": torch.cuda.get_allocator_backend(),
                "live": torch.cuda.memory_allocated(device),
                "live_peak": torch.cuda.max_memory_allocated(device),
                "reserved": torch.cuda.memory_reserved(device),
            }
        else:
            numbers |= {
                "allocator": f"gruyere, {sys.modules['gruyere._enable'].door()[0]}",
                "validate": library.gruyere_validate(),
            } | statistics(library, device)
            # What a program is told that asks torch.
            numbers |= {
                "torch_live": torch.cuda.memory_allocated(device),
                "torch_live_peak": torch.cuda.max_memory_allocated(device),
                "torch_reserved": torch.cuda.memory_reserved(device),
            }
        devices.append(numbers)
    with open(os.path.join(os.environ["GRUYERE_TEST_REPORTS"], f"{pid}.json"), "w") as file:
        json.dump({"arguments": sys.argv, "devices": devices}, file)


def counters(phantom):
    import ctypes

    for name in ("phantom_physical", "phantom_physical_peak"):
        function = getattr(phantom, name)
        function.restype = ctypes.c_uint64
        yield function


def in_use():
    """The Gruyère library that is loaded in this process, if any."""
    import ctypes

    path = os.environ["GRUYERE_TEST_LIBRARY"]
    try:
        return ctypes.CDLL(path, mode=ctypes.DEFAULT_MODE | os.RTLD_NOLOAD)
    except OSError:
        return None


def statistics(library, device):
    """`gruyere_stats`, the fields of version 1 that the tests look at, by name."""
    import ctypes

    names = """total_memory limit reserved reserved_peak live live_peak pending arena_free
        largest_free slab_bytes slab_free captured retries out_of_memories bad_frees events_recorded
        events_queried""".split()

    class Stats(ctypes.Structure):
        _fields_ = [("size", ctypes.c_uint32), ("version", ctypes.c_uint32)] + [
            (n, ctypes.c_uint64) for n in names
        ]

    numbers = Stats(size=ctypes.sizeof(Stats))
    code = library.gruyere_stats(device, ctypes.byref(numbers))
    return {"stats": code} | {name: getattr(numbers, name) for name in names}


if "GRUYERE_TEST_REPORTS" in os.environ:
    sys.meta_path.insert(0, AfterTorch())
