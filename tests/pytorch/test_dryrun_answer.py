"""The answer that the tests of `gruyere report` read is one that the package writes."""

import json
import os

from conftest import ROOT
from gruyere._bench.measure import COMPLETED, FAILED
from gruyere._dryrun import gpus, live, report
from gruyere._dryrun.runs import Plan, Ran
from gruyere._dryrun.worker import Found
from test_dryrun_scope import MIB, Nowhere, Trace

KEPT = ROOT / "crates" / "cli" / "tests" / "dryrun_answer.json"


def answer():
    """An answer with a row that completed and one that failed."""
    asked = {
        "script": "train.py", "python_options": [], "steps": 3, "max_gb": None, "ranks": None,
        "name": "train",
        "gruyere": "0.1.0", "gpus": gpus.chosen([], [], None), "others": [],
    }  # fmt: skip
    arguments = ("--batch", "8")
    (gpu,) = asked["gpus"]
    trace = Trace(40)
    analysis = live.analyse(trace.entries, trace.seen, Nowhere())
    figures = dict(steps=3, requested_peak=analysis["requested_peak"])
    facts = {"torch": "2.11.0", "cuda": "13.0", "architectures": ["sm_90"]}

    def ran(allocator, outcome, **more):
        plan = Plan(allocator, gpu, report.usable(gpu), arguments)
        return Ran(plan, Found(outcome, facts=facts, **more), unknown={})

    analysed = ran("default", COMPLETED, analysis=analysis, **figures)
    rows = [
        ran("gruyere", COMPLETED, allocated_peak=200 * MIB, physical_peak=210 * MIB, **figures),
        ran("expandable", FAILED, reason="killed by SIGSEGV"),
    ]
    found = report.made(asked, arguments, analysed, analysed, rows, {}, {}, None)
    found["sandbox"] = {"way": "overlay", "said": "", "runs": 4}
    found["seconds"] = 9.5
    found["run"] = report.identity(asked, 10**9) | {"pid": 7, "host": "box"}
    return json.dumps(found, indent=1) + "\n"


def test_the_answer_that_report_is_tested_with_is_what_the_package_writes():
    if "GRUYERE_BLESS" in os.environ:
        KEPT.write_text(answer())
    assert KEPT.read_text() == answer(), "stale: run this test with GRUYERE_BLESS=1"
