"""Analysis of torch's allocation history and of what the hooks saw: the memory live at the peak by
kind, module and line, its course over time, and the sequence of requests. Pure logic."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Optional

from .lines import NOWHERE, Lines
from .hooks import (
    BACKWARD, GRADIENTS, OPTIMIZER, RECOMPUTING, STATES, WEIGHTS, WORKSPACES, Seen,
)  # fmt: skip
from .scope import scope

ACTIVATIONS, RECOMPUTED, TEMPORARIES = "activations", "recomputed", "temporaries"
OTHER = "other"
KINDS = (WEIGHTS, GRADIENTS, STATES, ACTIVATIONS, RECOMPUTED, TEMPORARIES, WORKSPACES, OTHER)
_PRECEDENCE = {WEIGHTS: 0, STATES: 1, GRADIENTS: 2, WORKSPACES: 3}
_PHASES = ("the program", "backward", "the optimiser's step", "backward, computing again")
# The functions in which torch.utils.checkpoint recomputes: the reentrant and the other kind.
_AGAIN = ("backward", "unpack_hook")
# Fewer bytes than this left behind by a step are not reported.
LITTLE = 64 << 10
# Turns of a loop that reads from the device and keeps more in each, from which on its end may be
# what it reads.
_TURNS = 4
# The most moments in the timeline.
_MOMENTS = 600
NEVER = 1 << 62


@dataclass
class Block:
    """A block, from its allocation to its free."""

    bytes: int
    requested: int
    begin: int
    """The index of its allocation among all events."""
    mark: int
    phase: int
    module: str
    line: str
    inside: str
    """The line in a library other than torch; "" if there is none."""
    group: int
    end: int = NEVER
    end_mark: int = NEVER
    kind: str = ""
    name: str = ""
    """The name of the parameter that it belongs to."""


def whole(size: int) -> int:
    """The size of a request as allocators count it."""
    return max(512, -(-size // 512) * 512)


class History:
    """The blocks of one device's trace, each with its kind."""

    def __init__(self, trace: list[dict[str, Any]], seen: Seen, lines: Lines) -> None:
        self.seen = seen
        self.lines = lines
        self.blocks: list[Block] = []
        self.groups: list[str] = []
        self.events = 0
        # The peak of requested bytes as torch's statistics count them: a block counts until the
        # streams told of by record_stream are done with it, not until the program frees it.
        self.requested_peak = 0
        # The marks of the requests that were refused for want of memory, and the number of events
        # before each.
        self.refused: list[int] = []
        self.refused_at: list[int] = []
        # Whether torch's history contains our metadata.
        self.told = any(entry.get("user_metadata") for entry in trace)
        self._read(trace)
        for block in self.blocks:
            block.kind = block.kind or self._kind(block)

    def _read(self, trace: list[dict[str, Any]]) -> None:
        live: dict[int, Block] = {}
        groups: dict[str, int] = {}
        requested: dict[int, int] = {}
        requested_now = 0
        sightings, at = self.seen.sightings, 0
        for entry in trace:
            action = entry["action"]
            if action == "free_completed":
                requested_now -= requested.pop(entry["addr"], 0)
            if action not in ("alloc", "free_requested", "oom"):
                continue
            mark, phase, module, place = _metadata(entry)
            if action == "oom":
                self.refused.append(mark)
                self.refused_at.append(self.events)
                continue
            # Sightings before this event refer to the blocks that are live now.
            while at < len(sightings) and sightings[at][0] <= mark:
                _sighted(live, *sightings[at][1:])
                at += 1
            address = entry["addr"]
            if action == "free_requested":
                block = live.pop(address, None)
                if block is not None:
                    block.end, block.end_mark = self.events, mark
            else:
                frames = entry["frames"]
                line = self.lines.of_frames(frames)
                if line == NOWHERE and place:
                    # A thread of autograd: use the line that called backward and waits for it.
                    line = self.seen.places[place]
                if phase == BACKWARD and _computes_again(frames):
                    phase = RECOMPUTING
                root = f"{frames[-1]['filename']}:{frames[-1]['name']}" if frames else "autograd"
                group = groups.setdefault(root, len(groups))
                block = Block(
                    whole(entry["size"]), entry["size"], self.events, mark, phase,
                    self.seen.names[module], line,
                    self.lines.inside(frames), group,
                )  # fmt: skip
                live[address] = block
                self.blocks.append(block)
                requested[address] = block.requested
                requested_now += block.requested
                self.requested_peak = max(self.requested_peak, requested_now)
            self.events += 1
        for sighting in sightings[at:]:
            _sighted(live, *sighting[1:])
        self.groups = list(groups)

    def _kind(self, block: Block) -> str:
        """The kind of a block that no sighting has identified."""
        seen = self.seen
        if block.end_mark in seen.cleared:
            return WORKSPACES
        if block.phase == OPTIMIZER:
            return TEMPORARIES
        if block.phase == RECOMPUTING:
            # Nothing keeps a block that goes before the next request.
            return RECOMPUTED if block.end > block.begin + 1 else TEMPORARIES
        if block.phase == BACKWARD:
            return TEMPORARIES
        # A block that is live when the next backward begins was left by a forward.
        following = bisect_right(seen.backwards, block.mark)
        steps = bisect_right(seen.steps, block.end_mark) - bisect_right(seen.steps, block.mark)
        if following < len(seen.backwards) and block.end_mark >= seen.backwards[following]:
            # A block that lives longer than a step is not an activation.
            return ACTIVATIONS if steps <= 1 else OTHER
        return TEMPORARIES if block.end_mark != NEVER and steps == 0 else OTHER

    def tried(self, in_vain: int) -> int:
        """The number of requests that were refused before the first step ended of those after so
        many, and after which the program requested more; 0 if none ended."""
        steps = self.seen.steps
        if len(steps) <= in_vain:
            return 0
        last = max((block.begin for block in self.blocks), default=-1)
        went_on = bisect_right(self.refused_at, last)
        return min(went_on, bisect_right(self.refused, steps[in_vain]))

    def changes(self) -> list[tuple[int, int, Block]]:
        """All events as (index, bytes added or removed, block)."""
        found = [(block.begin, block.bytes, block) for block in self.blocks]
        found += [(block.end, -block.bytes, block) for block in self.blocks if block.end != NEVER]
        found.sort(key=lambda change: change[0])
        return found


def _metadata(entry: dict[str, Any]) -> tuple[int, int, int, int]:
    words = entry.get("user_metadata", "").split()
    # The program may write metadata too.
    if len(words) != 4 or not all(map(str.isdigit, words)):
        return 0, 0, 0, 0
    mark, phase, module, place = map(int, words)
    return mark, phase, module, place


def _computes_again(frames: list[dict[str, Any]]) -> bool:
    """Whether the stack, innermost frame first, is that of a checkpointed function that is being
    recomputed."""
    for frame in frames:
        if frame["name"] == "_engine_run_backward":
            return False
        if frame["name"] in _AGAIN and frame["filename"].endswith("torch/utils/checkpoint.py"):
            return True
    return False


def _sighted(live: dict[int, Block], address: int, kind: str, name: str) -> None:
    block = live.get(address)
    if block is None:
        return
    if _PRECEDENCE[kind] < _PRECEDENCE.get(block.kind, 9) or (
        kind == block.kind and not block.name
    ):
        block.kind, block.name = kind, name


def analyse(
    trace: list[dict[str, Any]],
    seen: Seen,
    lines: Lines,
    partial: Sequence[int] = (),
    in_vain: int = 0,
) -> dict[str, Any]:
    """The whole analysis, as plain data. `partial`: the numbers of the steps that are only a part
    of one. `in_vain`: the number of steps before the last request that was refused and that the
    program went on after; neither they nor what it had until then is what it needs."""
    history = History(trace, seen, lines)
    changes = history.changes()
    tried = history.tried(in_vain)
    since = history.refused_at[tried - 1] if tried else 0
    total, most, at = 0, 0, -1
    for index, change, block in changes:
        total += change
        # What is freed after a refusal is of what was tried.
        if total > most and change > 0 and index >= since:
            most, at = total, index
    live = [block for block in history.blocks if block.begin <= at < block.end]
    workspaces = sum(block.bytes for block in live if block.kind == WORKSPACES)
    return {
        "peak": {**_peak(live, most, at, history, in_vain), "refused": tried},
        "requested_peak": history.requested_peak,
        "growth": _growth(history, in_vain, since),
        "steps": scope(history, changes, partial, in_vain),
        "timeline": _timeline(changes, history.events, seen),
        "sequence": _sequence(history),
        "workspaces": workspaces if history.told else None,
        "loop": _loop(history),
        "reads": [
            {"line": line, "what": what, "inside": inside, "count": count}
            for (line, what, inside), count in Counter(
                read[1:] for read in seen.reads
            ).most_common()
        ],
    }


def _peak(
    live: list[Block], most: int, at: int, history: History, in_vain: int
) -> dict[str, Any]:
    kinds: Counter[str] = Counter()
    modules: dict[str, Counter[str]] = defaultdict(Counter)
    repeats: dict[str, set[str]] = defaultdict(set)
    places: dict[str, Counter[str]] = defaultdict(Counter)
    last: Optional[Block] = None
    for block in live:
        kinds[block.kind] += block.bytes
        module = block.name.rpartition(".")[0] if block.name else block.module
        if block.kind == WORKSPACES:
            # Otherwise they would be charged to the first module that used cuBLAS.
            module = "(cuBLAS)"
        path = collapsed(module)
        modules[path][block.kind] += block.bytes
        repeats[path].add(module)
        places[block.line][block.kind] += block.bytes
        if block.begin == at:
            last = block
    step = bisect_right(history.seen.steps, last.mark) + 1 - in_vain if last else 0
    return {
        "bytes": most,
        "step": step if history.told else 0,
        "phase": _PHASES[last.phase] if last and history.told else "",
        "line": last.line if last else "",
        "kinds": {kind: kinds[kind] for kind in KINDS},
        "modules": [
            {"module": path, "count": len(repeats[path]), "bytes": sum(of.values()), "kinds": of}
            for path, of in _largest(modules)
        ],
        "lines": [
            {"line": line, "bytes": sum(of.values()), "kinds": of} for line, of in _largest(places)
        ],
    }


def _largest(of: dict[str, Counter[str]]) -> list[tuple[str, Counter[str]]]:
    return sorted(of.items(), key=lambda item: (-sum(item[1].values()), item[0]))


def collapsed(path: str) -> str:
    """The path with numbers replaced: `model.layers.*.mlp` for every layer."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


def _growth(history: History, in_vain: int, since: int) -> Optional[dict[str, Any]]:
    """The memory that each step leaves behind at the end of the last one, at lines where every step
    but the last left some: the last step's may still be freed, and memory that only the first step
    left is not growth. What a program makes after its optimiser's step counts to the next step, so
    the first step need not have left any at a line that kept nothing then; then it is `unsure` and
    a queue may hold it. None if there are fewer than three steps, or if it is little. Steps made
    in vain are none of them, nor is what was requested before event `since`."""
    steps = history.seen.steps[in_vain:]
    if len(steps) < 3 or not history.told:
        return None
    end = steps[-1]
    left: dict[str, Counter[int]] = defaultdict(Counter)
    # Lines at which the first step made something that a later one freed: a queue.
    let_go: set[str] = set()
    for block in history.blocks:
        if block.kind not in (ACTIVATIONS, OTHER) or block.mark >= end or block.begin < since:
            continue
        made = bisect_right(steps, block.mark)
        if block.end_mark >= end:
            left[block.line][made] += block.bytes
        elif not made and block.end_mark >= steps[1]:
            let_go.add(block.line)
    last = len(steps) - 1
    grown, late = {}, {}
    for line, of in left.items():
        if all(of[step] for step in range(last)):
            # The first step has what came before it too (a buffer that is filled first).
            grown[line] = sum(of[step] for step in range(1, last)) // (last - 1)
        elif line not in let_go and not of[0] and all(of[step] for step in range(1, last + 1)):
            late[line] = min(of[step] for step in range(1, last + 1))
    is_unsure = sum(late.values()) >= LITTLE
    if is_unsure:
        grown.update(late)
    total = sum(grown.values())
    if total < LITTLE:
        return None
    most = max(grown, key=lambda line: grown[line])
    return {"bytes_a_step": total, "line": most, "unsure": is_unsure}


def _loop(history: History) -> Optional[dict[str, Any]]:
    """The loop in which the last request was refused: one line of the program has read from the
    device again and again, with more live each time, and neither a step nor a batch of a DataLoader
    in between. What it reads is invented, and may be what ends it. None if there is none."""
    if not history.refused or not history.told:
        return None
    refused, seen = history.refused[-1], history.seen
    began = max((mark for mark in (*seen.steps, *seen.batches) if mark <= refused), default=0)
    turns: dict[tuple[str, str], list[int]] = defaultdict(list)
    for mark, line, _, inside in seen.reads:
        if began < mark <= refused:
            turns[line, inside].append(mark)
    changes = sorted(
        [(block.mark, block.bytes) for block in history.blocks]
        + [(block.end_mark, -block.bytes) for block in history.blocks if block.end != NEVER]
    )
    marks = [mark for mark, _ in changes]
    live = [0, *accumulate(change for _, change in changes)]
    for (line, inside), of in turns.items():
        last = sorted(of)[-_TURNS:]
        amounts = [live[bisect_left(marks, mark)] for mark in last]
        if len(last) == _TURNS and all(one < other for one, other in zip(amounts, amounts[1:])):
            return {"line": line, "inside": inside, "turns": len(of)}
    return None


def _timeline(changes: list[tuple[int, int, Block]], events: int, seen: Seen) -> dict[str, Any]:
    """The live memory by kind at the highest moment of each part of the run."""
    now = dict.fromkeys(KINDS, 0)
    width = max(1, -(-events // _MOMENTS))
    parts: list[dict[str, int]] = []
    highest, total, part = -1, 0, 0
    steps: list[int] = []
    kept = dict(now)
    for index, change, block in changes:
        if index // width != part:
            parts.append(kept)
            # No part is empty: each event is a change.
            part, highest = index // width, -1
        now[block.kind] += change
        total += change
        if change > 0 and len(steps) < bisect_right(seen.steps, block.mark):
            steps.append(len(parts))
        if total > highest:
            highest, kept = total, dict(now)
    parts.append(kept)
    return {"kinds": {kind: [of[kind] for of in parts] for kind in KINDS}, "steps": steps}


def _sequence(history: History) -> dict[str, Any]:
    """The requests in order: for each its size, thread and line, and the line of the last read from
    the device before it (-1: none). Lines and threads are given by number."""
    numbers: dict[str, int] = {}
    lines = [numbers.setdefault(block.line, len(numbers)) for block in history.blocks]
    insides = [numbers.setdefault(block.inside, len(numbers)) for block in history.blocks]
    seen = sorted(history.seen.reads)
    marks = [read[0] for read in seen]
    reads = []
    for block in history.blocks:
        before = bisect_right(marks, block.mark)
        if before:
            _, line, _, inside = seen[before - 1]
            reads.append(numbers.setdefault(inside or line, len(numbers)))
        else:
            reads.append(-1)
    return {
        "sizes": [block.bytes for block in history.blocks],
        "groups": [block.group for block in history.blocks],
        "at": lines,
        "inside": insides,
        "read": reads,
        "lines": list(numbers),
        "threads": history.groups,
    }
