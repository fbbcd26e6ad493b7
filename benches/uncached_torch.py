#!/usr/bin/env python3
"""Uncached PyTorch over Gruyère, beside torch's own caching and beside uncached torch alone, on the
stand-in GPU.

    benches/uncached_torch.py [--traces generate,llama7b_lora] [--rounds 5]
                              [--build target/release] [--python .venv-torch/bin/python]

With PYTORCH_NO_CUDA_MEMORY_CACHING=1 torch asks cudaMalloc and cudaFree for every tensor.
Preloaded, libgruyere.so serves these calls. Each row is a process of its own, in which torch's
allocator (its real code) is driven through every malloc and free of a recorded program, pass after
pass. The rows of a trace take turns, so that all see the same machine. Prints a table as Markdown.

Needs what tests/pytorch/run builds: run that once before. Traces with record_stream are left out:
uncached torch refuses it.
"""

import argparse
import ctypes
import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python_loader"))

from gruyere import _stand_in  # noqa: E402

TRACES = "generate,gpt2xl_accum,llama7b_full,llama7b_lora"
PASSES = 3

UNCACHED = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
# Name, whether the library is preloaded, settings.
ROWS = [
    ("torch's caching", False, {}),
    ("torch's expandable segments", False, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
    ("uncached torch", False, UNCACHED),
    ("uncached torch, managed", True, UNCACHED | {"GRUYERE_CONF": "preload:manage"}),
]


class Pass(ctypes.Structure):
    """As tests/pytorch/driver writes it: nanoseconds of the thread's processor time."""

    _fields_ = [("operations", ctypes.c_uint64), ("nanoseconds", ctypes.c_uint64)]


class Stats(ctypes.Structure):
    """The start of GruyereStats."""

    _fields_ = [("size", ctypes.c_uint32), ("version", ctypes.c_uint32)] + [
        (name, ctypes.c_uint64)
        for name in "total_memory limit reserved reserved_peak live live_peak".split()
    ]


def measure(build, trace_file):
    """In the child: passes over a trace through the allocator that this process has."""
    import torch

    phantom = ctypes.CDLL(str(build / "libphantom_cuda.so"))
    phantom.phantom_physical_peak.restype = ctypes.c_uint64
    driver = ctypes.CDLL(str(build / "libtorch_driver.so"))
    driver.torch_driver_open.restype = ctypes.c_void_p
    driver.torch_driver_streams.argtypes = [ctypes.c_void_p]
    driver.torch_driver_pass.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_uint32,
        ctypes.c_void_p,
        ctypes.c_void_p,
    ]
    torch.cuda.init()
    library = ctypes.CDLL(str(build / "libgruyere.so"))
    names = ("gruyere_malloc", "gruyere_free", "gruyere_record_stream", "gruyere_mark_step")
    functions = (ctypes.c_void_p * 4)(
        *(ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in names)
    )
    trace = driver.torch_driver_open(str(trace_file).encode())
    assert trace, trace_file
    streams = [torch.cuda.Stream() for _ in range(driver.torch_driver_streams(trace) - 1)]
    handles = (ctypes.c_size_t * (len(streams) + 1))(0, *(stream.cuda_stream for stream in streams))

    def once(who):
        measured = Pass()
        code = driver.torch_driver_pass(trace, handles, who, functions, ctypes.byref(measured))
        assert code == 0, code
        return measured.nanoseconds / measured.operations, measured.operations

    torchs, nobodys = 0, 2
    first, operations = once(torchs)
    peak = phantom.phantom_physical_peak(0)
    later = [once(torchs)[0] - once(nobodys)[0] for _ in range(PASSES - 1)]
    live_peak = bad_frees = None
    if "libgruyere" in os.environ["LD_PRELOAD"]:
        stats = Stats(size=ctypes.sizeof(Stats))
        assert library.gruyere_stats(0, ctypes.byref(stats)) == 0
        live_peak = stats.live_peak
        bad_frees = library.gruyere_validate()
    print(json.dumps({
        "operations": operations, "first": first, "later": statistics.median(later), "peak": peak,
        "live_peak": live_peak, "broken": bad_frees,
    }))  # fmt: skip


def run(row, arguments, trace_file, owner):
    """One child."""
    _, preloaded, settings = row
    libraries = ["libgruyere.so"] * preloaded + ["libphantom_cuda.so"]
    drop = re.compile(r"^(PHANTOM_|GRUYERE_|PYTORCH_|LD_PRELOAD$|LD_LIBRARY_PATH$)")
    environment = {key: value for key, value in os.environ.items() if not drop.match(key)} | {
        "LD_PRELOAD": " ".join(str(arguments.build / name) for name in libraries),
        "LD_LIBRARY_PATH": str(arguments.libraries),
        "PHANTOM_MEMORY": "200GiB",
        "PHANTOM_COSTS": "none",
        **owner.environment(),
    }
    command = [arguments.python, __file__, "--build", arguments.build, "--measure", trace_file]
    ran = subprocess.run(
        command, env=environment | settings, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(ran.stdout.splitlines()[-1])


def table(arguments, owner):
    """All traces, and lines of Markdown."""
    lines = [
        "| trace | allocator | peak live GiB | peak held GiB | hold | ns a call | ns a call, "
        "first pass | mallocs and frees |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name in arguments.traces.split(","):
        trace_file = ROOT / "traces" / f"{name}.trace.zst"
        results = [[] for _ in ROWS]
        for _ in range(arguments.rounds):
            for found, row in zip(results, ROWS):
                found.append(run(row, arguments, trace_file, owner))
        managed = results[-1]
        assert all(one["broken"] == 0 for one in managed), managed
        live = managed[0]["live_peak"]
        for found, (title, _, _) in zip(results, ROWS):
            middle = {
                key: statistics.median(one[key] for one in found)
                for key in ("later", "first", "peak")
            }
            lines.append(
                f"| {name} | {title} | {live / 2**30:.2f} | {middle['peak'] / 2**30:.2f} | "
                f"{middle['peak'] / live:.4f}"
                f" | {middle['later']:.0f} | {middle['first']:.0f} | {found[0]['operations']:,} |"
            )
    return lines


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", default=TRACES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--build", type=Path, default=ROOT / "target/release")
    parser.add_argument("--libraries", type=Path, default=ROOT / "target/phantom-libs")
    parser.add_argument("--python", type=Path, default=ROOT / ".venv-torch/bin/python")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    # What is preloaded must be found from any folder.
    arguments.build, arguments.libraries = (
        arguments.build.absolute(),
        arguments.libraries.absolute(),
    )
    if arguments.measure:
        measure(arguments.build, arguments.measure)
        return
    missing = [
        name
        for name in ("libgruyere.so", "libphantom_cuda.so", "libtorch_driver.so")
        if not (arguments.build / name).exists()
    ]
    if missing:
        sys.exit(
            f"{arguments.build}: no {', '.join(missing)}; run tests/pytorch/run once, or name "
            "the folder with --build"
        )
    with tempfile.TemporaryDirectory() as folder, _stand_in.Owner(Path(folder)) as owner:
        print("\n".join(table(arguments, owner)))
    print(
        f"\n{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} processors, "
        f"{arguments.rounds} rounds of {PASSES} passes, medians."
    )


if __name__ == "__main__":
    main()
