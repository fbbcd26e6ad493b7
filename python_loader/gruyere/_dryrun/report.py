"""The report: the verdict and the figures as plain data. Its keys are those of the JSON.

`gruyere report` reads some of them (crates/cli/src/report/dry.rs). The tests of both sides share
one answer, crates/cli/tests/dryrun_answer.json (tests/pytorch/test_dryrun_answer.py writes it).
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from typing import Any, Optional

from .._bench.measure import COMPLETED, OUT_OF_MEMORY
from .._bench.work import apart
from .._job import unused
from .amounts import size
from .gpus import GIB
from .masks import SELECTED
from .runs import ROOM, Ran, Rest, called
from .sizing import asks, limit, sizes_itself
from .trust import difference, little, parted

SCHEMA, VERSION = "gruyere.dryrun", 1
FITS, BROKEN, TOO_LARGE, UNTRUSTED = 0, 1, 3, 4
# NVIDIA libraries that need memory beside their operands: the prefix of their calls, the name of
# the row, and what is known of the size.
_ASKED = "decided by the library, which the stand-in replaces, and allocated by torch"
_LIBRARIES = {
    "cudnn": ("workspaces of cuDNN", _ASKED),
    "cusolver": ("workspaces of cuSOLVER", _ASKED),
    "cusparse": ("workspaces of cuSPARSE", _ASKED),
    "cufft": ("workspaces of cuFFT", _ASKED),
    "nccl": (
        "buffers of NCCL",
        "544 to 688 MB per group were seen on A100s (NVIDIA/nccl#964), 1.6 GB (NVIDIA/nccl#864), "
        "3.3 GB for an all-to-all between eight H100s (NVIDIA/nccl#1685)",
    ),
}
# The share of the GPU's memory of which less is left where a program fits tightly.
_TIGHT = 0.02
# Peaks of two runs with the same values may differ by one part in so many: Python's collector frees
# cycles at other times in an analysed run.
_ALIKE = 1000
# Facts of a run that do not describe the machine.
_TOLD = (
    "answered", "left_out", "sizing", "never_stepped", "short", "has_rest", "rest", "trials",
    "job",
)  # fmt: skip
# The phase of a peak that is none of the steps'.
AFTER = "after the steps"
_WORDS = {
    FITS: "fits", BROKEN: "failed", TOO_LARGE: "does not fit", UNTRUSTED: "not trustworthy",
}  # fmt: skip


def usable(gpu: dict[str, Any]) -> int:
    """The GPU's memory that is available to allocators."""
    memory: int = gpu["memory"]
    context: int = gpu["context"]
    return max(0, memory - context)


def made(
    asked: dict[str, Any],
    arguments: tuple[str, ...],
    first: Ran,
    second: Ran,
    plain: list[Ran],
    with_room: dict[tuple[str, str], Ran],
    smallest: dict[tuple[str, str], int],
    sweep: Optional[dict[str, Any]],
    by_host: bool = False,
    rest: Rest = Rest(),
) -> dict[str, Any]:
    """The report. `first` and `second` are the two analysed runs. `by_host`: their requests differ
    also with the same values on the device."""
    gpus = []
    for gpu in asked["gpus"]:
        rows = []
        for ran in plain:
            if ran.plan.gpu is gpu:
                key = (gpu["id"], ran.plan.allocator)
                rows.append(_row(rest.after(ran), with_room.get(key), smallest.get(key), gpu))
        gpus.append({
            **_gpu(gpu), "runs": rows, "fits": any(row["fits"] for row in rows),
            "kernels": _kernels(gpu, first),
        })  # fmt: skip
    analysis = first.found.analysis or {}
    shown = analysis
    if rest.whole is not None and rest.needs_more and rest.whole.found.analysis:
        shown = rest.whole.found.analysis
        if rest.whole.live_peak > first.live_peak or not rest.whole.completed:
            shown["peak"] = {**shown["peak"], "step": 0, "phase": AFTER}
    if shown.get("peak"):
        of = first if shown is analysis else rest.whole
        is_out = of is not None and of.found.outcome == OUT_OF_MEMORY
        shown["peak"] = {**shown["peak"], "out_of_memory": is_out}
    trust = _trust(first, second, plain, by_host, rest)
    caught = max((ran.found.caught for ran in (first, *plain) if ran.completed), default=0)
    sizing = sizes_itself(first.found.facts.get("sizing"), caught)
    bound = None if asked["max_gb"] is None else int(asked["max_gb"] * GIB)
    held = [row["peak_held"] for row in gpus[0]["runs"] if not row["failed"]]
    needs = min(held) + gpus[0]["context"]["bytes"] if held else None
    script, module = asked.get("script"), asked.get("module")
    program = [asked["script"]] if module is None else ["-m", module]
    code = FITS
    is_more = bound is not None and needs is not None and needs > bound
    if not all(gpu["fits"] for gpu in gpus) or is_more:
        code = TOO_LARGE
    elif rest.growth is not None:
        spare = [(_spare(gpu), gpu["id"]) for gpu in gpus]
        if bound is not None and needs is not None:
            spare.append((bound - needs, f"{asked['max_gb']:g} GiB of --max-gb"))
        trust["reasons"] += _gathered(rest.growth, *min(spare))
    if code == TOO_LARGE and SELECTED in trust["answered"]:
        trust["reasons"].append(
            "masks select every element in these runs, the most that they can, and with fewer it "
            "may need less"
        )
    if any(ran.failed for ran in plain):
        # The failed rows have no figures, and the failure may be the program's own.
        code = BROKEN
    if trust["reasons"]:
        code = UNTRUSTED
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "program": {
            "script": script, "module": module, "arguments": list(arguments),
            "command": " ".join([*program, *arguments]), "python_options": asked["python_options"],
            "steps_asked": asked["steps"], "steps": first.found.steps,
            "left_out": first.found.facts.get("left_out", []), "ranks": asked["ranks"],
        },
        "machine": {
            **{key: value for key, value in first.found.facts.items() if key not in _TOLD},
            "stand_in": True,
        },
        "checked_against_silicon": False,
        "verdict": {
            "exit": code, "word": _WORDS[code], "fits": all(gpu["fits"] for gpu in gpus),
            "max_bytes": bound, "needs": needs,
        },
        "gpus": gpus,
        "others": [_other(gpu, gpus[0], sizing is not None) for gpu in asked["others"]],
        "sizing": sizing,
        "trials": first.found.facts.get("trials"),
        "analysed": {
            "gpu": first.plan.gpu["id"], "with_room": first.plan.memory == ROOM,
            "outcome": first.found.outcome,
        },
        "fixed_costs": _fixed(gpus[0], first),
        "peak": shown.get("peak"),
        "growth": analysis.get("growth"),
        "steps": analysis.get("steps"),
        "rest": _rest(rest),
        "timeline": shown.get("timeline"),
        "trust": trust,
        "sweep": sweep,
    }  # fmt: skip


def _rest(rest: Rest) -> Optional[dict[str, Any]]:
    """What was found after the steps; None if nothing was run there."""
    if rest.whole is None:
        return None
    found = rest.whole.found
    told = found.facts.get("rest")
    if told is None or found.outcome not in (COMPLETED, OUT_OF_MEMORY):
        reason = found.reason or "the program ended before its steps were made"
        return {
            "stopped": reason, "line": "", "inside": "", "growth": None, "unread": [], "again": "",
            "cut": False, "left": 0, "batches": 0, "loaders": 0, "peak_live": None,
            "needs_more": None,
        }  # fmt: skip
    if rest.whole.loop is not None:
        told = {**told, "stopped": f"it ran out of memory {in_a_loop(rest.whole.loop)}"}
    return {**told, "peak_live": found.allocated_peak, "needs_more": rest.needs_more}


def _spare(gpu: dict[str, Any]) -> int:
    """The most that an allocator leaves of a GPU on which the program fits."""
    return max(row["margin"] for row in gpu["runs"] if row["fits"])


def _gathered(growth: dict[str, Any], spare: int, of: str) -> list[str]:
    """That the evaluation may run out of memory later than it was run, if it may. `spare`: the
    bytes that are left of `of`."""
    each, has, given = growth["bytes_a_batch"], growth["batches"], growth["given"]
    said = (
        f"each batch of the DataLoader at {growth['line']} leaves {size(each)} behind, and "
        f"{given:,}{'' if has is None else f' of {has:,}'} were run in the time that there is"
    )
    if has is None or each * (has - given) > spare:
        return [f"{said}: after {spare // each:,} more {of} is full"]
    if each * (has - given + has) > spare:
        return [f"{said}: if all are joined (torch.cat), {of} has no room for both"]
    return []


def in_a_loop(loop: dict[str, Any]) -> str:
    """Where a run is out of memory that another value might have ended before."""
    inside = f" (in {loop['inside']})" if loop["inside"] else ""
    return (
        f"in a loop that has read from the GPU {loop['turns']} times, at {loop['line']}{inside}, "
        "and whose end may be a value that the stand-in only invents"
    )


def identity(asked: dict[str, Any], started_nanoseconds: int) -> dict[str, Any]:
    """What tells this answer from others."""
    return {
        "name": asked["name"], "pid": os.getpid(), "host": socket.gethostname(),
        "started_nanoseconds": started_nanoseconds, "gruyere": asked["gruyere"],
    }  # fmt: skip


def _gpu(gpu: dict[str, Any]) -> dict[str, Any]:
    return {
        **{key: gpu[key] for key in ("id", "name", "capability", "multiprocessors", "memory")},
        "memory_source": gpu["memory_source"],
        "context": {
            "bytes": gpu["context"], "known": gpu["context_known"],
            "source": gpu["context_source"],
        },
        "usable": usable(gpu),
    }  # fmt: skip


def _row(
    ran: Ran, room: Optional[Ran], smallest: Optional[int], gpu: dict[str, Any]
) -> dict[str, Any]:  # fmt: skip
    """The row of a GPU under one allocator. If the run ended early, the peaks are those of a run
    with room to spare; a run that failed has none."""
    fits = ran.fits
    if ran.failed:
        return {
            "allocator": called(ran.plan.allocator), "outcome": ran.found.outcome, "fits": False,
            "failed": True, "reason": ran.found.reason, "steps": ran.found.steps,
            **dict.fromkeys(
                ("peak_live", "peak_requested", "peak_held", "margin", "smallest_device",
                 "smallest_gpu")
            ),
            "at_size": ran.plan.memory != ROOM, "retries": 0, "tight": False, "caught": 0,
            "filled": False,
            "after": "",
        }  # fmt: skip
    told = ran.found if fits or room is None else room.found
    after = ran.found.facts.get("rest") or {}
    bound = limit(told.facts.get("sizing"), gpu["memory"], usable(gpu))
    has = usable(gpu) if bound is None else bound
    margin = has - told.physical_peak
    if fits:
        # Some pages beyond a limit of the program's own.
        margin = max(0, margin)
    else:
        # Held memory can be released, live memory cannot.
        margin = has - told.allocated_peak
    is_full = fits and margin < has * _TIGHT
    return {
        "allocator": called(ran.plan.allocator),
        "outcome": ran.found.outcome,
        "fits": fits,
        "failed": False,
        "reason": ran.found.reason,
        "steps": ran.found.steps,
        "peak_live": told.allocated_peak,
        "peak_requested": told.requested_peak,
        "peak_held": told.physical_peak,
        "at_size": told is ran.found,
        "retries": ran.found.retries,
        "tight": bool(is_full and ran.found.retries and not ran.found.caught),
        # By what was tried in vain, for all that is known.
        "filled": bool(is_full and ran.found.caught),
        # The last one may have ended it.
        "caught": max(0, ran.found.caught - (ran.found.outcome == OUT_OF_MEMORY)),
        "margin": margin if fits or margin < 0 else None,
        "smallest_device": smallest,
        "smallest_gpu": None if smallest is None else smallest + gpu["context"],
        "limit": bound,
        "short": ran.short,
        "after": "" if fits else after.get("line", ""),
    }  # fmt: skip


def _kernels(gpu: dict[str, Any], ran: Ran) -> Optional[bool]:
    """Whether this build of torch has kernels for the GPU; None if it does not list them."""
    built = ran.found.facts.get("architectures")
    if not built:
        return None
    major, minor = map(int, gpu["capability"].split("."))
    for name in built:
        kind, _, number = name.partition("_")
        digits = number.rstrip("af")
        if not digits.isdigit():
            continue
        has = int(digits[:-1]), int(digits[-1])
        # Code runs on later chips of its generation, PTX on all later ones.
        same = has[0] == major and has[1] <= minor and number == digits
        exact = has == (major, minor)
        if exact or (kind == "sm" and same) or (kind == "compute" and has <= (major, minor)):
            return True
    return False


def _other(
    gpu: dict[str, Any], measured: dict[str, Any], sizes_itself: bool
) -> dict[str, Any]:  # fmt: skip
    """The row of a GPU on which nothing was run, judged by the figures of another. A program that
    sizes itself would request other amounts there."""
    has = usable(gpu)
    rows = []
    for row in measured["runs"]:
        if row["failed"] or sizes_itself:
            rows.append({"allocator": row["allocator"], "by_the_books": "unknown"})
            continue
        word = "fits" if row["peak_held"] <= has else "close"
        word = "too small" if row["peak_live"] > has else word
        rows.append({"allocator": row["allocator"], "by_the_books": word})
    return {**_gpu(gpu), "runs": rows}


def _fixed(gpu: dict[str, Any], first: Ran) -> list[dict[str, Any]]:
    """The costs that do not depend on the model, each with its source."""
    analysis = first.found.analysis or {}
    return [
        {
            "name": "CUDA context", "bytes": gpu["context"]["bytes"],
            "known": gpu["context"]["known"], "held": False, "source": gpu["context"]["source"],
        },
        {
            "name": "cuBLAS workspaces", "bytes": analysis.get("workspaces"),
            "known": analysis.get("workspaces") is not None, "held": True,
            "source": "torch's own code allocates them, one per thread and stream; size at the "
            "peak. torch 2.15 and newer keep none: each call allocates one "
            "(TORCH_CUBLAS_WORKSPACE_CACHE=1 keeps them)",
        },
        {
            "name": "kernels and handles", "bytes": None, "known": False, "held": False,
            "source": "the context's figure includes those of the programs that it was measured "
            "with; loading all of torch's kernels at once, not at their first use, took 362 MiB "
            "more (pytorch/pytorch#86509); the memory that cublasCreate takes is not published "
            "(pytorch/pytorch#128601)",
        },
        *_unknown(first.unknown, first.found.facts.get("job") is not None),
    ]  # fmt: skip


def _unknown(calls: Optional[dict[str, int]], has_ranks: bool) -> list[dict[str, Any]]:
    """The memory that libraries need beside their operands: one row per library called. Several
    ranks (`has_ranks`) call NCCL, though the one that was run did not."""

    def row(name: str, source: str) -> dict[str, Any]:
        return {"name": name, "bytes": None, "known": False, "held": False, "source": source}

    if calls is None:
        return [row("workspaces of libraries", "unknown: the stand-in has written no books")]
    rows = []
    for prefix, (name, why) in _LIBRARIES.items():
        of = Counter({call: count for call, count in calls.items() if call.startswith(prefix)})
        if of:
            said = [f"{call} x{count}" for call, count in of.most_common(3)]
            more = [f"{len(of) - 3} more calls"] if len(of) > 3 else []
            rows.append(row(name, f"unknown, {why}: " + ", ".join(said + more)))
        elif prefix == "nccl" and has_ranks:
            rows.append(row(name, f"unknown, {why}"))
    return rows


def _trust(
    first: Ran, second: Ran, plain: list[Ran], by_host: bool, rest: Rest = Rest()
) -> dict[str, Any]:
    reasons: list[str] = []
    analysis = first.found.analysis or {}
    # It made the steps as well.
    longest = rest.whole if rest.whole is not None and rest.whole.found.analysis else first
    reasons += _job(first.found.facts.get("job"))
    if first.loop is not None:
        reasons.append(f"it ran out of memory {in_a_loop(first.loop)}")
    differ = small = None
    least = 0
    for ran in (first, *plain):
        if ran.short:
            where = "" if ran is first else f" with {called(ran.plan.allocator)}"
            reasons.append(ran.short + where)
            break
    never = first.found.facts.get("never_stepped")
    if never and first.completed and not first.short:
        steps = f"{first.found.steps} step{'s' * (first.found.steps != 1)}"
        more = f" (nor had {len(never) - 1} others)" if len(never) > 1 else ""
        reasons.append(
            f"after {steps} the {never[0]} had not stepped{more}, and the figures have nothing of "
            "its step"
        )
    if second.found.outcome != first.found.outcome:
        reasons.append(
            "with random values on the device the program did not complete its steps: "
            f"{second.found.reason or second.found.outcome}"
        )
    elif analysis and second.found.analysis is not None:
        differ = parted(analysis, second.found.analysis)
        if differ is None:
            small = difference(analysis["sequence"], second.found.analysis["sequence"])
            least = little(analysis, second.found.analysis)
    if differ is not None and by_host:
        reasons.append(
            f"two runs with the same values on the device made different requests, first at "
            f"{differ['line']}: they differ by the program's own random numbers, or the order of "
            "its threads; seed what it draws on the host (torch.manual_seed; random.seed and "
            "numpy.random.seed if it uses them)"
        )
    elif differ is not None:
        read = f", after a value was read at {differ['read']}" if differ["read"] else ""
        reasons.append(
            "two runs, with zeros and with random values on the device, made different requests, "
            f"first at {differ['line']}{read}"
        )
    if analysis and first.completed and analysis["requested_peak"] != first.found.requested_peak:
        reasons.append(
            f"torch's history is incomplete: it has {analysis['requested_peak']} B requested at "
            f"the peak, torch's statistics have {first.found.requested_peak} B"
        )
    if rest.is_unsure:
        reasons.append(
            "after the steps it ran out of memory with zeros on the device, and not with random "
            "values"
        )
    gone_on = [rest.whole] if rest.whole is not None else []
    others = max(ran.others for ran in (first, second, *plain, *gone_on))
    if others:
        reasons.append(
            f"{others} other process{'es' * (others != 1)} of the program used the device, and no "
            "figure here includes their memory"
        )
    for ran in plain:
        same = ran.plan.allocator == "default" and ran.plan.memory == first.plan.memory
        if same and ran.plan.gpu is first.plan.gpu and ran.completed:
            low, high = sorted((ran.found.requested_peak, first.found.requested_peak))
            if (high - low) * _ALIKE > high:
                if not by_host:
                    reasons.append(
                        "the peak differs from run to run: two runs with the same values requested "
                        f"{ran.found.requested_peak} B and {first.found.requested_peak} B at it"
                    )
    if not reasons and not asks(first.found.facts):
        reasons += _rows_differ(first, plain)
    return {
        "reasons": reasons,
        "by_host": by_host,
        "difference": differ,
        "small": small and {**small, "least": least},
        "peaks": {"zeros": first.found.allocated_peak, "random": second.found.allocated_peak},
        "requests": len(analysis["sequence"]["sizes"]) if analysis else 0,
        "answered": longest.found.facts.get("answered", {}),
        "reads": (longest.found.analysis or {}).get("reads", []),
        "host_reads": longest.host_reads,
        "managed": longest.managed,
    }


def _job(job: Optional[dict[str, Any]]) -> list[str]:
    """Why the first rank of a job does not stand for the others, if it does not."""
    if job is None:
        return []
    if not job["is_used"]:
        return [unused(job["ranks"])]
    if job["sends"]:
        return [
            "its ranks send to each other, as the stages of a pipeline do: each holds another part "
            "of the model, and only the first was run"
        ]
    return []


def _rows_differ(first: Ran, plain: list[Ran]) -> list[str]:
    """Whether the program requested other amounts under another allocator on the same GPU: then it
    took another path. One that asks for free memory is told other amounts there."""
    peak = (first.found.analysis or {}).get("peak") or {}
    # The second is without the remainders that torch's default does not split off.
    live = (first.found.allocated_peak, peak.get("bytes", first.found.allocated_peak))
    for ran in plain:
        found = ran.found
        if ran.plan.gpu is not first.plan.gpu or not ran.completed or not first.completed:
            continue
        if found.caught or first.found.caught or not found.requested_peak:
            continue
        if not apart(found.requested_peak, first.found.requested_peak):
            continue
        # Requested bytes count blocks that other streams use (record_stream: FSDP) until their work
        # is seen to be done. The program did the same if as much was live, and requested in all.
        is_live_alike = any(not apart(found.allocated_peak, number) for number in live)
        if not is_live_alike or apart(found.requested_total, first.found.requested_total):
            return [
                f"the program requested other amounts with {called(ran.plan.allocator)}: "
                f"{found.requested_peak} B at the peak, and {first.found.requested_peak} B where "
                "it was analysed: a value that it read, or its own random numbers, led it elsewhere"
            ]
    return []
