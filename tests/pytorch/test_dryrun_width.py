"""What `gruyere dryrun` prints fits a terminal of 80 columns, whatever the GPUs are called."""

import io
import sys

import pytest

from conftest import ROOT  # noqa: F401 (the package's folder is on the path)
from gruyere import GruyereError
from gruyere._bench.measure import COMPLETED, FAILED, OUT_OF_MEMORY
from gruyere._dryrun import gpus, live, report, text
from gruyere._dryrun.runs import Plan, Ran
from gruyere._dryrun.worker import Found
from test_dryrun_scope import GIB, Nowhere, Trace

LONGEST = max((gpu["id"] for gpu in gpus.known()), key=len)
# A row that completed, one that was short of memory, and one without figures.
OUTCOMES = (COMPLETED, OUT_OF_MEMORY, FAILED)


def answer(names, outcomes=OUTCOMES, with_smallest=False, held=None):
    """A dry run's report on these GPUs, with an allocator for each outcome."""
    asked = {
        "script": "train.py", "python_options": [], "steps": 3, "max_gb": None, "ranks": None,
        "name": "train",
        "gruyere": "0.1.0", "gpus": gpus.chosen(names, [], None), "others": [],
    }  # fmt: skip
    trace = Trace(300, 300, 300)
    analysis = live.analyse(trace.entries, trace.seen, Nowhere())
    figures = dict(steps=3, requested_peak=analysis["requested_peak"])
    facts = {"torch": "2.15.0", "cuda": "13.0", "architectures": ["sm_90"]}

    def ran(gpu, allocator, outcome, **more):
        plan = Plan(allocator, gpu, report.usable(gpu), ("--batch", "8"))
        return Ran(plan, Found(outcome, facts=facts, **figures, **more), unknown={})

    rows = []
    for gpu in asked["gpus"]:
        most = held or gpu["memory"] - gpu["context"] - GIB
        for allocator, outcome in zip(("expandable", "gruyere", "async"), outcomes):
            peaks = dict(allocated_peak=most, physical_peak=most, retries=1, reason="it failed")
            rows.append(ran(gpu, allocator, outcome, **peaks))
    analysed = ran(asked["gpus"][0], "default", COMPLETED, analysis=analysis)
    least = {(row.plan.gpu["id"], row.plan.allocator): row.plan.gpu["memory"] for row in rows}
    found = report.made(
        asked, (), analysed, analysed, rows, {}, least if with_smallest else {}, None
    )
    found["sandbox"] = {"way": "overlay", "said": "", "runs": 8}
    return found


def devices(found, width=80):
    """The part with the table of GPUs."""
    return text.draw(found, width).split("\n\n")[2].splitlines()


@pytest.mark.parametrize("with_smallest", [False, True])
@pytest.mark.parametrize("name", [gpu["id"] for gpu in gpus.known()])
def test_the_answer_fits_80_columns_on_every_gpu(name, with_smallest):
    for names in ([name], ["h100", name, LONGEST]):
        # On a device with room the peaks may be larger than any GPU.
        for held in (None, 999 * GIB):
            found = answer(names, with_smallest=with_smallest, held=held)
            lines = text.draw(found, 80).splitlines()
            assert max(map(len, lines)) <= 80, "\n".join(lines)


def test_reads_of_the_device_are_told_in_80_columns_too():
    found = answer(["h100"])
    found["trust"]["answered"] = {"masks select every element": 12}
    read = {"line": "train.py:3", "what": "item", "inside": "", "count": 1_615}
    found["trust"]["reads"] = [read]
    lines = text.draw(found, 80).splitlines()
    assert max(map(len, lines)) <= 80, "\n".join(lines)
    said = "Values read from the device, 1,615 times (the stand-in invents them but for the"
    assert said in " ".join(" ".join(lines).split())


@pytest.mark.parametrize("columns, most", [("80", 80), ("", 100)])
def test_in_a_file_the_answer_is_as_wide_as_columns_says(monkeypatch, columns, most):
    monkeypatch.setenv("COLUMNS", columns)
    with io.StringIO() as file:
        monkeypatch.setattr(sys, "stdout", file)
        # As where standard output is no terminal.
        monkeypatch.setattr(sys, "__stdout__", file)
        widest = max(map(len, text.draw(answer(["a100-40", LONGEST])).splitlines()))
        assert most - 10 < widest <= most


def test_no_figure_is_lost_where_the_table_is_narrow():
    found = answer(["a100-40", LONGEST], with_smallest=True)
    narrow, wide = devices(found), devices(found, 120)
    assert wide[0].split()[:2] == ["GPU", "memory"] and wide[1].startswith("a100-40  ")
    assert narrow[0].split()[:2] == ["allocator", "fits"]
    assert f"{LONGEST}, 15.60 GiB" in narrow, narrow
    words = [word.strip(",") for word in " ".join(narrow[1:]).split()]
    assert sorted(words) == sorted(" ".join(wide[1:]).split())
    # Columns stand below each other.
    rows = [line for line in narrow if line.startswith("  ") and "GiB" in line]
    assert len(rows) == 4 and len({line.index("GiB") for line in rows}) == 1, narrow


def test_a_table_that_fits_keeps_a_line_for_each_row():
    found = answer(["h100"], [COMPLETED])
    head, row, *_ = devices(found, 120)
    width = max(len(head), len(row))
    assert devices(found, width)[:2] == [head, row]
    assert devices(found, width - 1)[1] == "h100-80, 79.10 GiB"


def test_the_sentences_of_a_narrow_answer_are_broken_between_words():
    found = answer(["h100"])
    notes = " ".join(devices(found))
    assert "left: memory free at the peak." in notes
    trust = text.draw(found, 80).split("Can it be trusted?\n")[1]
    said = "Two runs, with zeros and with random values on the device, made the same"
    assert said in " ".join(trust.split()) and " ".join(trust.split()).count("requests.") == 1


def test_the_error_for_an_unknown_gpu_names_every_known_one_in_80_columns():
    with pytest.raises(GruyereError) as refused:
        gpus.find("rtx9999")
    lines = f"gruyere dryrun: {refused.value}".splitlines()
    assert lines[0].endswith("--gpu rtx9999: unknown GPU; use --gb N or one of these:")
    assert max(map(len, lines)) <= 80, lines
    named = "".join(lines[1:]).replace(" ", "").split(",")
    assert named == [gpu["id"] for gpu in gpus.known()]
