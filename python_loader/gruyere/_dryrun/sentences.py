"""The answer in sentences: the verdict, and what it does not cover."""

from __future__ import annotations

from typing import Any

from .._bench.work import listed
from .amounts import about, size, times
from .lines import NOWHERE
from .live import LITTLE
from .masks import SELECTED
from .report import AFTER
from .scope import least, spread

# What would fill the GPU after more steps than this is not worth a sentence.
_MANY = 100_000


def verdict(report: dict[str, Any]) -> str:
    """The answer in one or two sentences."""
    said = []
    is_trusted = not report["trust"]["reasons"]
    if not is_trusted:
        said.append("Not trustworthy: " + "; ".join(report["trust"]["reasons"]) + ".")
    differ = spread(report)
    these = _these(report)
    for gpu in report["gpus"]:
        fitting = [row for row in gpu["runs"] if row["fits"]]
        if fitting:
            best = max(fitting, key=lambda row: row["margin"])
            others = [
                row["allocator"] for row in gpu["runs"] if not row["fits"] and not row["failed"]
            ]
            beside = f", not with {' or '.join(others)}" if others else ""
            of = f" of its own limit of {size(best['limit'])}" if best.get("limit") else ""
            spare = f"{size(best['margin'])} to spare{of} with {best['allocator']}"
            if best.get("filled"):
                said += _filled(report, gpu, is_trusted, these, fitting, beside)
            elif is_trusted:
                said.append(f"It fits{these} on {gpu['id']}: {spare}{beside}.")
            else:
                said.append(f"These runs had {spare} on {gpu['id']}{beside}.")
            if best["caught"] and not best.get("filled"):
                often = times(best["caught"])
                said.append(f"(It ran out of memory {often} there, caught the error and went on.)")
        elif any(not row["failed"] and not row.get("short") for row in gpu["runs"]):
            said.append(_unfit(report, gpu, is_trusted))
        for row in gpu["runs"]:
            if row["failed"]:
                why = row["reason"] or row["outcome"]
                said.append(f"On {gpu['id']} it failed with {row['allocator']}: {why}.")
        if gpu["kernels"] is False:
            said.append(
                f"(This build of torch has no kernels for {gpu['name']}, capability "
                f"{gpu['capability']}: the program would not run there.)"
            )
    if is_trusted and SELECTED in report["trust"].get("answered", {}):
        said.append("Masks select every element in these runs: with fewer it needs less.")
    if is_trusted and report["verdict"]["fits"]:
        said += _after(report) + _handling(report) + _trials(report)
    if differ:
        said.append(_differing(report, *differ))
    if report["growth"]:
        said += _growth(report)
    bound = report["verdict"]["max_bytes"]
    needs = report["verdict"]["needs"]
    if bound is not None and needs is not None:
        word = "within" if needs <= bound else "more than"
        said.append(f"It needs {size(needs)}, {word} the {size(bound)} of --max-gb.")
    return " ".join(said)


def _filled(
    report: dict[str, Any],
    gpu: dict[str, Any],
    is_trusted: bool,
    these: str,
    fitting: list[dict[str, Any]],
    beside: str,
) -> list[str]:
    """That a program fits which ran out of memory on the way and filled the GPU by that, as a
    search for the largest batch does."""
    names = listed([row["allocator"] for row in fitting])
    what = f"It fits{these} on" if is_trusted else "These runs completed on"
    often = times(max(row["caught"] for row in fitting))
    said = [
        f"{what} {gpu['id']} with {names}{beside}. It ran out of memory {often} there, caught the "
        "error and went on: what it tried in vain filled the GPU, so what is to spare is not known."
    ]
    peak, analysed = report.get("peak"), report.get("analysed") or {}
    is_here = analysed.get("gpu") == gpu["id"] and not analysed.get("with_room")
    if is_here and peak and peak.get("refused") and not peak["out_of_memory"]:
        said.append(
            f"After that it had {size(peak['bytes'])} of {size(gpu['usable'])} live at most, with "
            "torch."
        )
    return said


def _after(report: dict[str, Any]) -> list[str]:
    """Sentences on what comes after the steps, where they fit and it was run."""
    rest = report["rest"]
    if not rest or rest["needs_more"] is None:
        return []
    said = []
    left = _left(report)
    if rest["needs_more"]:
        if report["peak"]["phase"] == AFTER:
            said.append(f"The peak is after the steps, at {report['peak']['line']}.")
    elif rest["batches"] and not rest["stopped"] and not rest["unread"] and not left:
        what = "The rest of the program"
        if rest["again"]:
            what = f"What follows, up to {rest['again']} where it trains again"
        elif rest["cut"]:
            what = "What ran once the trainer was told to stop"
        said.append(f"{what}, with {_fed(rest)}, needs no more.")
    said += left
    if rest["unread"]:
        at = " and ".join(rest["unread"][:2])
        said.append(
            f"But no batch was read of the DataLoader made at {at}: what it feeds, an evaluation "
            "now and then, is not counted."
        )
    return said


def _handling(report: dict[str, Any]) -> list[str]:
    """That the program may look for the largest batch that fits, of which the steps are the first
    tries."""
    program, sizing = report["program"], report.get("sizing") or {}
    at = sizing.get("handles")
    if at is None or sizing["caught"] or program["steps"] < program["steps_asked"]:
        return []
    return [
        f"But it handles out-of-memory errors at {at}, and met none: if it looks there for the "
        "largest batch that fits, its later steps need more."
    ]


def _trials(report: dict[str, Any]) -> list[str]:
    """That the steps are of the first trials of a search for hyperparameters."""
    trials = report.get("trials")
    if not trials:
        return []
    at = "" if trials["line"] == NOWHERE else f" that begins at {trials['line']}"
    return [
        f"But the steps are of the first trials of the search{at} ({trials['library']}): any "
        "later ones, which may be larger, were not run."
    ]


def _fed(rest: dict[str, Any]) -> str:
    """The batches with which the rest of the program was run."""
    most, loaders = rest["batches"], rest["loaders"]
    batches = f"{most} batch{'es' * (most != 1)}"
    return f"{batches} of one DataLoader" if loaders == 1 else (
        f"up to {batches} of each of {loaders} DataLoaders"
    )


def _left(report: dict[str, Any]) -> list[str]:
    """What the evaluation of a trainer that was told to stop has left behind, if anything."""
    rest, gpu = report["rest"], report["gpus"][0]
    if rest["left"] < LITTLE or any(row.get("filled") for row in gpu["runs"]):
        return []
    more = max(row["margin"] for row in gpu["runs"] if row["fits"]) // rest["left"]
    if more > _MANY:
        return []
    then = f"is full after {more:,} more" if more else "has no room for the next"
    fed = f", with {_fed(rest)}," if rest["batches"] else ""
    return [
        f"But its trainer was told to stop, and the one evaluation{fed} left "
        f"{size(rest['left'])} behind: if each later one does, {gpu['id']} {then}."
    ]


def _inside(rest: dict[str, Any]) -> str:
    return f", in {rest['inside']}" if rest["inside"] else ""


def _these(report: dict[str, Any]) -> str:
    """What fits: the steps that ran. A program without steps ran to its end."""
    steps, asked = report["program"]["steps"], report["program"]["steps_asked"]
    rank = first_rank(report)
    of = f" of {rank}" if rank else ""
    if not steps:
        return f" a run{of}" if of else ""
    if steps < asked:
        made = f"{steps} step{'s' * (steps != 1)}"
        return f" the {made} that it made ({asked} were asked){of}"
    return f" this step{of}" if steps == 1 else f" these {steps} steps{of}"


def first_rank(report: dict[str, Any]) -> str:
    """What ran, if it is one of several ranks."""
    ranks = report["program"].get("ranks")
    return "" if ranks is None else f"the first of {ranks} ranks"


def _unfit(report: dict[str, Any], gpu: dict[str, Any], is_trusted: bool) -> str:
    """That the program does not fit on a GPU, and what it runs into."""
    margins = [row["margin"] for row in gpu["runs"] if row["margin"] is not None]
    sizing = report.get("sizing") or {}
    limits = [row["limit"] for row in gpu["runs"] if row.get("limit") is not None]
    missing = f"at least {size(-max(margins))}" if margins else ""
    after = [row["after"] for row in gpu["runs"] if row.get("after")]
    if after and is_trusted:
        return (
            f"It does not fit on {gpu['id']}: its steps do, and after them it runs out of memory "
            f"at {after[0]}{_inside(report['rest'])}{missing and f': {missing} too small'}."
        )
    if not is_trusted:
        return f"These runs did not fit on {gpu['id']}{missing and f': {missing} too small'}."
    if limits:
        less = missing and f", {missing} too little"
        return (
            f"It does not fit on {gpu['id']}: it runs into its own limit, the fraction "
            f"{sizing['fraction']:g} of the memory set at {sizing['limited']} "
            f"({size(min(limits))}){less}."
        )
    if sizing.get("asked") is not None and not missing:
        return (
            f"It does not fit on {gpu['id']}: it sizes itself by the device's memory, which it "
            f"asks for at {sizing['asked']}, and runs out of it."
        )
    if not missing:
        return f"It does not fit on {gpu['id']}{_where(report, gpu)}."
    return f"It does not fit on {gpu['id']}: {missing} too small."


def _where(report: dict[str, Any], gpu: dict[str, Any]) -> str:
    """Where a program runs out of memory that on another device would need less."""
    peak, caught = report["peak"], max(row["caught"] for row in gpu["runs"])
    said = f": it runs out of memory {times(caught + 1)}"
    if not peak or not peak["out_of_memory"] or report["analysed"]["gpu"] != gpu["id"]:
        return said if caught else ""
    return f"{said}, with {size(peak['bytes'])} live at {peak['line']}"


def _differing(report: dict[str, Any], least: int, most: int) -> str:
    """A warning that other steps may need more memory: how much, and how to run more steps."""
    return (
        f"But steps differ: their activations take {about(least)} to {about(most)}. A larger "
        f"step needs more: one n times the largest, {_larger(report)}. --steps runs more steps."
    )


def _growth(report: dict[str, Any]) -> list[str]:
    """The memory that steps leave behind, and how long the GPU has room for it."""
    grown = report["growth"]["bytes_a_step"]
    said = f"But each step leaves {size(grown)} behind, most of it at {report['growth']['line']}"
    runs = report["gpus"][0]["runs"]
    left = max((row["margin"] for row in runs if row["fits"]), default=0)
    if not left or any(row.get("filled") for row in runs):
        return [f"{said}."]
    more = left // grown
    if more > _MANY:
        return []
    on = report["gpus"][0]["id"]
    return [f"{said}: if that goes on, {on} is full after {more:,} more steps."]


def scope(report: dict[str, Any]) -> list[str]:
    """Sentences on what the steps that were run do not cover."""
    program, found = report["program"], report.get("steps")
    number = program["steps"]
    ran = f"{number} step{'s' * (number != 1)}"
    said = []
    rest = report["rest"]
    if number >= program["steps_asked"]:
        later = "longer input, an evaluation, a checkpoint"
        if rest and rest["batches"]:
            later = "longer input, later evaluations" if rest["cut"] else "longer input"
        said.append(
            f"The dry run covers the first {ran}, not what comes later ({later}): --steps COUNT "
            "runs more."
        )
    ranks = program.get("ranks")
    if ranks is not None:
        said.append(
            f"Of {ranks} ranks the first was run, beside others that exchange nothing: each rank "
            "needs a GPU of its own, and one that holds another part of the model may need more."
        )
    if rest:
        at = f" at {rest['line']}" if rest["line"] else ""
        until = f", until it stopped{at}: {rest['stopped']}" if rest["stopped"] else ""
        if rest["again"]:
            until = f", up to {rest['again']} where it trains again"
        told = "Once its trainer was told to stop, the" if rest["cut"] else "The"
        fed = f" with {_fed(rest)}" if rest["batches"] else ""
        if not fed and rest["needs_more"] is not None:
            fed = ", and no other DataLoader gave a batch"
        said.append(f"{told} rest of the program was run{fed}{until}.")
    if found:
        low, most = least(found, "activations"), max(found["activations"])
        if spread(report):
            said.append(f"Steps differ: their activations take {about(low)} to {about(most)}.")
        elif number > 1:
            each = "each that is whole" if found["partial"] else "each"
            said.append(f"Steps are alike: the activations of {each} take {about(most)}.")
        than = " as the largest of these" if spread(report) else ""
        said.append(
            f"A batch n times as large, or a step n times as long{than}, would need "
            f"{_larger(report)}; more if something grows with the square of the length."
        )
    return said


def _larger(report: dict[str, Any]) -> str:
    """The memory that a larger step would need, as a formula."""
    steps = report["steps"]
    return f"about {about(steps['fixed_bytes'])} + n x {about(steps['growing_bytes'])} live"


def runs(report: dict[str, Any]) -> str:
    """How often the program ran, and what became of its files."""
    program = report["program"]
    name = program["script"] or f"-m {program['module']}"
    runs = report["sandbox"]["runs"]
    is_kept = report["sandbox"]["way"] == "none"
    harm = "what they wrote stays" if is_kept else "your files are unchanged"
    return f"{name}: {runs} runs of {program['steps']} steps; {harm}."


def sizes_itself(sizing: dict[str, Any]) -> str:
    """Why nothing is said of other GPUs."""
    how = []
    if sizing["asked"] is not None:
        how.append(f"asks for the device's memory at {sizing['asked']}")
    if sizing["fraction"] is not None:
        how.append(f"limits itself to {sizing['fraction']:g} of the memory at {sizing['limited']}")
    if sizing["caught"]:
        how.append("caught an out-of-memory error and went on")
    elif sizing.get("reduces") is not None:
        how.append(f"tries smaller batches if one does not fit, at {sizing['reduces']}")
    elif sizing.get("handles") is not None:
        how.append(f"handles out-of-memory errors at {sizing['handles']}")
    return (
        f"the program may size itself by its GPU (it {', it '.join(how)}), so these figures tell "
        "nothing of another; only a run does (--gpu NAME)"
    )
