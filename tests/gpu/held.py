#!/usr/bin/env python3
"""The recorded programs (traces/small/programs) on a real GPU: the memory that torch's allocators
and Gruyère hold at the peak, and the time of a step.

    python tests/gpu/held.py [--only NAMES] [--programs FOLDER] [--at-once N] [--limit SECONDS]
                             [--json FILE]

Runs each program under each allocator, in a process of its own, and prints a table. Programs that
need several ranks, a second device, or a package that is missing are left out, and named. With
`--at-once 1` the times of steps can be compared; memory can be with any number.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import statistics
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Dict, List, Optional

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import machine  # noqa: E402
from acceptance import started  # noqa: E402
from machine import MIB  # noqa: E402

# In the bundle, in the repository.
PROGRAMS = next(
    (
        folder
        for folder in (HERE / "programs", HERE.parent.parent / "traces/small/programs")
        if folder.is_dir()
    ),
    HERE / "programs",
)
HELPERS = {"llama", "ranks", "recorder"}
# They need more than one GPU, or another package.
SEVERAL = {"data_parallel", "zero3"}
# A rank of eight. The others are not there: a collective of the fake process group does nothing.
RANKED = {"ddp", "fsdp1", "fsdp2_of_8"}
COMPARED = ("native", "expandable", "gruyere")


def measured(name: str, allocator: str, programs: Path) -> Dict[str, Any]:
    """Runs a program in this process; its numbers."""
    if name in RANKED:
        os.environ["WORLD_SIZE"] = "8"
    machine.install(allocator)
    import random

    import torch

    marks: List[Any] = []
    hosts: List[float] = []

    def step() -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        marks.append(event)
        hosts.append(time.perf_counter())

    def blank(*shape: int, high: int = 1000, dtype: Any = torch.long) -> Any:
        if dtype == torch.long:
            return torch.randint(high, shape).cuda()
        return torch.zeros(shape, dtype=dtype).cuda()

    # In place of the module that records requests on the stand-in.
    recorder = types.ModuleType("recorder")
    torch.manual_seed(1)
    recorder.__dict__.update(
        draw=random.Random(1),
        random=random,
        step=step,
        steps=range,
        blank=blank,
        mark=lambda text: None,
    )
    torch.backends.cuda.enable_cudnn_sdp(False)
    sys.modules["recorder"] = recorder
    if name in RANKED:
        sys.modules["ranks"] = fake_ranks()
    # Programs of another folder import helpers (llama) of the usual one.
    sys.path[:0] = [str(programs), str(PROGRAMS)]
    sys.argv = [str(programs / f"{name}.py")]
    ended = None
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as error:
        ended = error.code
    if ended:
        return {"failed": str(ended)}
    torch.cuda.synchronize()
    answer: Dict[str, Any] = {"peaks": machine.peaks(allocator)}
    # The device's time from step to step, and the host's; the first two warm up.
    answer["steps_ms"] = [a.elapsed_time(b) for a, b in zip(marks, marks[1:])][2:]
    answer["host_ms"] = [(b - a) * 1e3 for a, b in zip(hosts, hosts[1:])][2:]
    if allocator == "gruyere":
        machine.books_are_sound()
        answer["stats"] = machine.gruyere_stats()
    return answer


def fake_ranks() -> types.ModuleType:
    """In place of the programs' module of ranks."""
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def begin(ranks: int) -> None:
        distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)

    module = types.ModuleType("ranks")
    module.__dict__.update(begin=begin, end=distributed.destroy_process_group)
    return module


def run(name: str, allocator: str, arguments: argparse.Namespace, folder: Path) -> Dict[str, Any]:
    file = folder / f"{name}-{allocator}.txt"
    with file.open("w") as stderr:
        command = [sys.executable, __file__, "--one", name, allocator]
        command += ["--programs", str(arguments.programs)]
        out, ended = started(command, allocator, stderr, arguments.limit)
    answers = [line for line in out.splitlines() if line.startswith('{"')]
    if ended == "exit code 0" and answers:
        answer: Dict[str, Any] = json.loads(answers[-1])
        return answer
    lines = [line for line in file.read_text(errors="replace").splitlines() if line.strip()]
    return {"failed": f"{ended}: {lines[-1] if lines else 'no message'}"}


def median(values: List[float]) -> Optional[float]:
    return statistics.median(values) if values else None


def row(name: str, answers: Dict[str, Dict[str, Any]]) -> str:
    cells = [name]
    failed = [
        f"{allocator}: {answer['failed']}"
        for allocator, answer in answers.items()
        if "failed" in answer
    ]
    if failed:
        return f"| {name} | {'; '.join(failed)[:300]} |"
    live = min(answer["peaks"]["live"] for answer in answers.values())
    cells.append(f"{live / MIB:,.0f}")
    cells += [f"{answers[each]['peaks']['reserved'] / MIB:,.0f}" for each in COMPARED]
    cells.append(f"{answers['gruyere']['peaks']['reserved'] / live:.3f}")
    for kind in ("steps_ms", "host_ms"):
        times = [median(answers[each][kind]) for each in COMPARED]
        base = times[0]
        cells += [f"{it / base:.3f}" if it and base else "" for it in times[1:]]
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="NAMES", help="programs, with commas")
    parser.add_argument(
        "--programs", type=Path, default=PROGRAMS, metavar="FOLDER", help="where they are"
    )
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="processes at a time")
    parser.add_argument("--limit", type=float, default=90, metavar="SECONDS", help="for a process")
    parser.add_argument("--json", type=Path, default=Path("gpu-held.json"), metavar="FILE")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measured(*arguments.one, arguments.programs)), flush=True)
        return 0
    known = sorted({path.stem for path in arguments.programs.glob("*.py")} - HELPERS)
    names = [name for name in arguments.only.split(",") if name] or [
        name for name in known if name not in SEVERAL
    ]
    for name in set(names) - set(known):
        parser.error(f"--only {name}: there is no such program; there are {', '.join(known)}")
    stderr = arguments.json.with_suffix(".stderr")
    stderr.mkdir(parents=True, exist_ok=True)
    # Torch drops what autocast has kept in the order of hashes.
    os.environ |= {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    results: Dict[str, Dict[str, Any]] = {name: {} for name in names}

    def one(job: tuple[str, str]) -> None:
        name, allocator = job
        results[name][allocator] = run(name, allocator, arguments, stderr)
        if len(results[name]) == len(COMPARED):
            ordered = {each: results[name][each] for each in COMPARED}
            print(row(name, ordered), flush=True)
            arguments.json.write_text(json.dumps({"version": 1, "programs": results}) + "\n")

    print(
        "| program | live | torch | expandable | Gruyère, MiB | of live "
        "| device step: expandable | Gruyère, of torch | host step: expandable "
        "| Gruyère, of torch |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|", flush=True)
    with ThreadPoolExecutor(arguments.at_once) as pool:
        list(pool.map(one, [(name, allocator) for name in names for allocator in COMPARED]))
    failed = sum("failed" in answer for each in results.values() for answer in each.values())
    print(f"\n{len(names)} programs, {failed} runs failed.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
