#!/usr/bin/env python3
"""Gruyère's acceptance on a real GPU: one table, one JSON file, under eight minutes.

    python tests/gpu/acceptance.py [--quick] [--only PARTS] [--json FILE]

Needs torch with CUDA and libgruyere.so (`cargo build --release`, or $GRUYERE_LIBRARY). README.md says what each part shows. On the phantom, which
keeps books and runs no kernel, the same parts run, and the table says what was not judged.

Exits with 0 where nothing failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from machine import ALLOCATORS, GIB, MIB, library_file  # noqa: E402

PROGRAMS = ("pretrain", "varied", "generate")
# Seconds after which a part is taken for hung. On a GPU none takes a quarter of it; a shared machine without one is slow.
LIMIT = 240.0

PASSED, FAILED, BOOKS, MEASURED = "passed", "FAILED", "books only", "measured"


@dataclass
class Row:
    """A line of the table."""

    part: str
    what: str
    verdict: str
    result: str


@dataclass
class Report:
    quick: bool
    facts: Dict[str, Any] = field(default_factory=dict)
    rows: List[Row] = field(default_factory=list)
    details: Dict[str, Any] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    @property
    def kernels(self) -> bool:
        return bool(self.facts["kernels_run"])

    def add(self, part: str, what: str, verdict: str, result: str) -> None:
        self.rows.append(Row(part, what, verdict, result))
        print(f"  ({part}) {what}: {verdict}; {result}", file=sys.stderr, flush=True)

    def judged(self) -> str:
        """The verdict of a part that held: with kernels it is judged whole, without only its books are."""
        return PASSED if self.kernels else BOOKS


class PartFailed(Exception):
    pass


def run(script: str, allocator: str, limit: float, **settings: Any) -> Dict[str, Any]:
    """Runs a part in a process of its own and hands back its answer. Raises PartFailed with the end of what it said."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTORCH_")}
    if ALLOCATORS[allocator]:
        environment["PYTORCH_CUDA_ALLOC_CONF"] = ALLOCATORS[allocator]
    command = [sys.executable, str(HERE / f"{script}.py"), allocator, json.dumps(settings)]
    child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = child.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        raise PartFailed(f"took more than {limit:.0f} s")
    except BaseException:
        child.kill()
        raise
    if child.returncode != 0:
        how = f"killed by {signal.Signals(-child.returncode).name}" if child.returncode < 0 else f"exit code {child.returncode}"
        lines = [line for line in err.strip().splitlines() if line.strip()]
        raise PartFailed(f"{how}: {lines[-1] if lines else 'no message'}")
    answer: Dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    if "failed" in answer:
        raise PartFailed(answer["failed"])
    return answer


def losses(report: Report) -> None:
    steps = 6 if report.quick else 30
    answers = {allocator: run("losses", allocator, LIMIT, steps=steps) for allocator in ("native", "gruyere")}
    report.details["losses"] = answers
    native, ours = answers["native"], answers["gruyere"]
    same = sum(a == b for a, b in zip(native["losses"], ours["losses"]))
    what = "one seeded training, native and Gruyère"
    if not report.kernels:
        report.add("a", what, BOOKS, f"{steps} steps ran under both; losses need kernels")
    elif native["losses"] == ours["losses"] and native["weights"] == ours["weights"]:
        report.add("a", what, PASSED, f"{same} of {steps} losses and the weights are the same, bit for bit")
    else:
        report.add("a", what, FAILED, f"{same} of {steps} losses are the same; weights the same: {native['weights'] == ours['weights']}")


def canaries(report: Report) -> None:
    seconds = 4 if report.quick else 60
    answer = run("canaries", "gruyere", seconds + LIMIT, seconds=seconds, threads=2)
    report.details["canaries"] = answer
    moves = answer["moves"]
    done = (
        f"{moves.get('allocate', 0):,} blocks, {moves.get('hand_over', 0):,} handed to another stream, {moves['streams_destroyed']} streams"
        f" destroyed, {moves['captures']} captures, {moves['replays']:,} replays, {moves['released_in_flight']} released in flight"
    )
    mismatches = f"{answer['wrong']} mismatches" if report.kernels else "no two live blocks met, nothing was left; patterns need kernels"
    report.add("b", f"canaries for {seconds} s", report.judged(), f"{mismatches}; {done}")
    # The same with a hook left out on purpose: what the canaries would say of a wrong allocator.
    planted = run("canaries", "gruyere", LIMIT, seconds=2 if report.quick else 5, record_stream=False)
    report.details["canaries_planted"] = planted
    result = f"{planted['wrong']} mismatches seen, as should be" if report.kernels else "ran; patterns need kernels"
    if report.kernels and not planted["wrong"]:
        result = "none seen: this device may be too fast for the canaries, so (b) says less"
    report.add("b", "the same with record_stream left out", MEASURED if report.kernels else BOOKS, result)


def graphs(report: Report) -> None:
    answer = run("graphs", "gruyere", LIMIT, rounds=8 if report.quick else 40)
    report.details["graphs"] = answer
    result = f"{answer['steps']} replays among {answer['eager_blocks']:,} eager blocks; all memory of graphs came back"
    if report.kernels:
        result += f"; largest difference to eager training {answer['largest_difference']:.1e}"
    report.add("c", "a captured training step, graphed callables, graphs in one pool", report.judged(), result)


def out_of_memory(report: Report) -> None:
    answer = run("out_of_memory", "gruyere", LIMIT, allowed=GIB)
    report.details["out_of_memory"] = answer
    report.add(
        "d",
        "out of memory and recovery at 1 GiB",
        report.judged(),
        f"{answer['filled']:.1%} of it could be filled; batches tried {answer['tried']}; {answer['threads_out_of_memory']} threads ran out at once",
    )


def programs(report: Report) -> None:
    tries, seconds = (1, 10.0) if report.quick else (6, 12.0)
    table: Dict[str, Dict[str, Any]] = {}
    report.details["programs"] = table
    for program in PROGRAMS:
        table[program] = {}
        live: Optional[int] = None
        # Ours first: its peak of live bytes is exact, and the same program's under every allocator.
        for allocator in ("gruyere", "native", "expandable", "async"):
            try:
                answer = run("programs", allocator, LIMIT, program=program, tries=tries, seconds=seconds, live=live)
            except PartFailed as failure:
                table[program][allocator] = {"failed": str(failure)}
                report.add("e", f"{program}, {allocator}", FAILED if allocator == "gruyere" else MEASURED, str(failure))
                continue
            live = live or answer["live"]
            table[program][allocator] = answer
            near = answer.get("near_limit")
            result = f"hold {answer['hold']:.3f}"
            result += f", fit {answer['fit']:.3f}" if answer["fit"] else ""
            if report.kernels:
                result += f", {answer['step_ms']:.1f} ms a step, {answer['tokens_per_s']:,.0f} tokens/s"
            if near:
                done = "completes" if near["completed"] else f"fails after {near['steps']} steps"
                result += f"; at {near['allowed']:.2f} of live: {done}"
                result += f", {near['step_ms']:.1f} ms a step" if report.kernels and near["completed"] else ""
            report.add("e", f"{program}, {allocator}", MEASURED if report.kernels else BOOKS, result)


def calibrate(report: Report) -> None:
    found = run("calibrate", "native", LIMIT, rounds=8 if report.quick else 40)
    report.details["calibrate"] = found
    verdict = MEASURED if report.kernels else BOOKS
    for kind, name in (("vmm", "mappings"), ("pools", "pools and plain allocations")):
        for size, costs in found.get(kind, {}).items():
            parts = ", ".join(f"{call} {cost['median_us']:.1f}" for call, cost in costs.items())
            calls = sum(cost["calls"] for cost in costs.values())
            report.add("f", f"{name} of {size}, us a call", verdict, parts if report.kernels else f"{calls} calls made; times need a driver")
    if "stalls" in found:
        waits = [name for name in ("map", "setAccess", "unmap") if found["stalls"][f"{name}: the host waits for a running kernel"]]
        slower = [value for name, values in found["stalls"].items() if name.startswith("kernels with") for value in values if value]
        result = "needs kernels"
        if slower:
            result = f"the host waits in {', '.join(waits) or 'none of them'}; kernels beside them last up to {max(slower):.2f} times as long"
        report.add("f", "do map, setAccess and unmap stall kernels?", verdict, result)
    if "aliases" in found:
        stale = found["aliases"]
        result = f"{stale['stale_copies'] + stale['stale_elements_in_kernels']} stale reads in {stale['rounds']} rounds" if report.kernels else "needs kernels"
        report.add("f", "reuse of a page through an alias, in stream order", report.judged(), result)
    if "pool_address_space" in found:
        spaces = found["pool_address_space"]
        taken = {name: space["after_one_alloc_bytes"] for name, space in spaces.items()}
        report.add(
            "f",
            "address space of a pool",
            verdict,
            ", ".join(f"{name}: {'refused' if size is None else f'{size / GIB:.2f} GiB'}" for name, size in taken.items()),
        )
        fragmented = found["pool_fragmentation"]
        report.add(
            "f",
            "a driver pool on a fragmenting trace",
            verdict,
            f"reserved {fragmented['reserved_high'] / GIB:.2f} GiB for {fragmented['used_high'] / GIB:.2f} used ({fragmented['hold']:.3f});"
            f" trimmed with {fragmented['live_at_trim'] / GIB:.2f} live: {fragmented['reserved_after_trim'] / GIB:.2f}",
        )
        rates = ", ".join(f"{threads}: {measured['pairs_per_s']:,.0f}" for threads, measured in found["concurrent_pool"].items())
        result = rates if report.kernels else f"{', '.join(found['concurrent_pool'])} threads, nothing was left; times need a driver"
        report.add("f", "alloc and free from one pool, pairs a second, by threads", verdict, result)
    report.add("f", "left on the device afterwards", verdict, f"{found['leaked_bytes'] / MIB:.0f} MiB")


PARTS: Dict[str, Tuple[str, Callable[[Report], None]]] = {
    "a": ("the same losses", losses),
    "b": ("canaries", canaries),
    "c": ("graphs among eager work", graphs),
    "d": ("out of memory", out_of_memory),
    "e": ("three programs, four allocators", programs),
    "f": ("calibration of the driver", calibrate),
}


def table(report: Report) -> str:
    heads = ("part", "what", "verdict", "result")
    lines = [[row.part, row.what, row.verdict, row.result] for row in report.rows]
    widths = [max(len(line[column]) for line in [list(heads), *lines]) for column in range(3)]
    rows = [list(heads), ["-" * width for width in widths] + ["-" * 6], *lines]
    return "\n".join("  ".join([*(cell.ljust(width) for cell, width in zip(line, widths)), line[3]]).rstrip() for line in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a short form of each part: a minute or two, for continuous integration")
    parser.add_argument("--only", default="".join(PARTS), metavar="PARTS", help="letters of the parts to run, e.g. abc (default: all)")
    parser.add_argument("--json", type=Path, default=Path("gpu-acceptance.json"), metavar="FILE", help="where the numbers go (default: %(default)s)")
    arguments = parser.parse_args()
    unknown = set(arguments.only) - set(PARTS)
    if unknown:
        parser.error(f"--only {arguments.only}: there is no part {', '.join(sorted(unknown))}; the parts are {''.join(PARTS)}")
    if not library_file().is_file():
        parser.error(f"{library_file()} is missing: run `cargo build --release`, or set GRUYERE_LIBRARY to a built libgruyere.so")
    report = Report(arguments.quick)
    try:
        report.facts = run("facts", "native", LIMIT)
    except PartFailed as failure:
        print(f"this machine cannot be tested: {failure}", file=sys.stderr)
        return 2
    for letter in sorted(set(arguments.only)):
        name, part = PARTS[letter]
        try:
            part(report)
        except PartFailed as failure:
            report.add(letter, name, FAILED, str(failure))
        # After each part, so that a crash later loses nothing.
        write(report, arguments.json)
    failed = sum(row.verdict == FAILED for row in report.rows)
    unjudged = sum(row.verdict == BOOKS for row in report.rows)
    facts = report.facts
    print(f"Gruyère on {facts['device']} ({facts['total_memory'] / GIB:.1f} GiB), torch {facts['torch']}, CUDA {facts['cuda']}\n")
    print(table(report))
    print(f"\n{len(report.rows)} lines, {failed} failed, {time.monotonic() - report.began:.0f} s. The numbers are in {arguments.json}.")
    if unjudged:
        print(f'{unjudged} lines say "{BOOKS}": no kernel runs on this machine, so bytes were counted, and no value and no time was judged.')
    return 1 if failed else 0


def write(report: Report, path: Path) -> None:
    document = {
        "version": 1,
        "machine": report.facts,
        "quick": report.quick,
        "seconds": time.monotonic() - report.began,
        "rows": [vars(row) for row in report.rows],
        "details": report.details,
    }
    whole = path.with_name(path.name + ".part")
    whole.write_text(json.dumps(document, indent=1) + "\n")
    whole.replace(path)


if __name__ == "__main__":
    sys.exit(main())
