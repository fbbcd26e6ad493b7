"""`gruyere compare` says first who holds least and why, is fair where a run did not complete, and
no wider than a terminal."""

import json
import sys
import time
from types import SimpleNamespace

import pytest

from gruyere._bench import compare, machine, parts, table, work
from gruyere._bench.compare import Program, Report, Row
from gruyere._bench.measure import COMPLETED, FAILED, OUT_OF_MEMORY, Result

MIB, GIB = 1 << 20, 1 << 30
FACTS = {"device": "stand-in GPU", "stand_in": True}
# torch's sentence, as one line.
LONG = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of " + "x" * 900


def said(default, expandable, gruyere, on_gpu=False, found=None, beside=220, steps=12):
    """The text for these rows: GiB that they held, or how they ended; `found`: the parts of what
    Gruyère held; `beside`: MiB of other libraries."""
    rows = []
    for name, end in zip(("default", "expandable", "gruyere"), (default, expandable, gruyere)):
        if isinstance(end, str):
            rows.append(Row(name, "", end, LONG))
        else:
            held = int(end * GIB)
            times = {"host_ns_a_step": 123.4e6, "step_ns": 1234.5e6, "steps": steps}
            peaks = {"physical_peak": held, "beside_peak": (beside + len(rows)) << 20}
            rows.append(Row(name, "", hold_ratio=end / 62.5, **peaks, **times))
    rows[-1].parts = found or {}
    program = Program("train.py", ["--batch-size", "8"], peak_live=int(62.5 * GIB), rows=rows)
    facts = {"device": "NVIDIA H100 80GB HBM3", "stand_in": not on_gpu, "torch": "2.11.0+cu130",
             "cuda": "13.0"}  # fmt: skip
    return table.markdown(Report(facts, {"ranks": None}, [program], 512.0))


def test_a_program_that_marks_no_step_has_no_time_of_one():
    assert "123.4 ms" in said(76.5, 64.5, 63.0)
    assert "123.4 ms" not in said(76.5, 64.5, 63.0, steps=0)


@pytest.mark.parametrize(
    ("rows", "conclusion"),
    [
        (
            (76.5, 64.5, 63.0),
            "Gruyère holds least: 63.00 GiB, 1.50 GiB (2.3%) less than the next, torch expandable.",
        ),
        (
            (76.5, 62.5, 63.0),
            "torch expandable holds least: 62.50 GiB. Gruyère holds 512 MiB (0.8%) more.",
        ),
        ((76.5, 63.0, 63.0), "Gruyère holds as little as torch expandable: 63.00 GiB."),
        (
            (OUT_OF_MEMORY, 70.0, 63.0),
            "torch default ran out of memory. Of the others, Gruyère holds least: 63.00 GiB, 7.00 "
            "GiB (10.0%) less than torch expandable.",
        ),
        (
            (60.0, FAILED, 63.0),
            "torch expandable failed. Of the others, torch default holds least: 60.00 GiB. Gruyère "
            "holds 3.00 GiB (5.0%) more.",
        ),
        (
            (OUT_OF_MEMORY, FAILED, 63.0),
            "Gruyère completed, and nothing else did: torch default ran out of memory and torch "
            "expandable failed.",
        ),
        (
            (76.5, 64.5, FAILED),
            "Gruyère did not complete: torch default and torch expandable did. There is nothing to "
            "compare.",
        ),
        (
            (FAILED, FAILED, FAILED),
            "Gruyère did not complete, nor did torch. There is nothing to compare.",
        ),
    ],
)
def test_the_first_line_says_who_holds_least_of_those_that_completed(rows, conclusion):
    text = said(*rows)
    assert text.split("\n\n")[0].replace("\n", " ") == conclusion


def differing(*rows):
    """What differs between rows, each a run or several: (live MiB, requested MiB, steps[, end])."""
    names = ("torch default", "torch expandable", "Gruyère")

    def run(live, requested, steps, end=COMPLETED, caught=0):
        peaks = {"allocated_peak": int(live * MIB), "requested_peak": int(requested * MIB)}
        return Result(end, steps=steps, caught=caught, **peaks)

    runs = [row if isinstance(row, list) else [row] for row in rows]
    return work.differences(
        [(name, [run(*one) for one in several]) for name, several in zip(names, runs)]
    )


@pytest.mark.parametrize(
    "rows",
    [
        [(100, 100, 8)] * 3,
        # Remainders that torch's default does not split off, in blocks of the same requests.
        [(180, 100, 8), (100, 100, 8), (100, 100, 8)],
        # Blocks that other streams use count as requested until these have gone on.
        [(100, 140, 8), (100, 100, 8), (100, 120, 8)],
        [(10, 10, 8), (13.9, 13.9, 8), (10, 10, 8)],
        [(1000, 1000, 8), (1029, 1029, 8), (1000, 1000, 8)],
        # cudaMallocAsync counts no requests, and does not round.
        [(160, 100, 8), (102, 0, 8)],
        # What ended before its end is no measure.
        [(100, 100, 8), (40, 40, 2, OUT_OF_MEMORY), (100, 100, 8)],
        [(100, 100, 8), (0, 0, 0, FAILED)],
        [(0, 0, 0, FAILED)] * 3,
    ],
)
def test_runs_of_the_same_work_are_compared(rows):
    assert differing(*rows) == []


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            [(72, 72, 8), (772, 772, 8), (264, 264, 8)],
            ["peak live was 72 MiB under torch default, 772 MiB under torch expandable and 264 MiB "
             "under Gruyère"],
        ),
        (
            [(100, 100, 8), (100, 100, 8), (100, 100, 3)],
            ["the steps were 8 under torch default, 8 under torch expandable and 3 under Gruyère"],
        ),
        (
            [(1000, 1000, 8), (1031, 1031, 8)],
            ["peak live was 1000 MiB under torch default and 1.01 GiB under torch expandable"],
        ),
        # Runs of one row among themselves.
        (
            [[(72, 72, 8), (264, 264, 8)], [(264, 264, 8)] * 2],
            ["peak live was 72 MiB to 264 MiB under torch default and 264 MiB under torch "
             "expandable"],
        ),
        (
            [(72, 72, 8, COMPLETED, 2), (264, 264, 8)],
            ["peak live was 72 MiB under torch default and 264 MiB under torch expandable",
             "the program caught out-of-memory errors and went on: 2 under torch default"],
        ),
    ],
)  # fmt: skip
def test_of_runs_of_different_work_it_says_what_differs(rows, said):
    assert differing(*rows) == said


MIBS = [30 * MIB, 20 * MIB, 20 * MIB, 5 * MIB]


def restoring(peak, requested, restores=3):
    """A run in which torch restored the state of a graphs' pool."""
    peaks = {"allocated_peak": peak * MIB, "requested_peak": peak * MIB}
    return Result(COMPLETED, steps=8, restores=restores, requested=requested, **peaks)


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (restoring(127, MIBS), True),
        # A few blocks more, as any two allocators may differ by.
        (restoring(127, [30 * MIB + 512, *MIBS[1:]]), True),
        # The same in all, and not in each step.
        (restoring(127, [20 * MIB, 30 * MIB, *MIBS[2:]]), False),
        (restoring(127, MIBS[:3]), False),
        (restoring(127, MIBS, restores=2), False),
        # A graph is not captured under each: nothing is restored there.
        (restoring(127, MIBS, restores=0), False),
    ],
)
def test_peaks_within_a_restore_of_a_graphs_pool_are_no_difference_of_work(other, same):
    found = work.differences(
        [("torch default", [restoring(166, MIBS)]), ("Gruyère", [other])]
    )
    said = ["peak live was 166 MiB under torch default and 127 MiB under Gruyère"]
    assert found == ([] if same else said)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_of_different_work_nobody_holds_least_and_each_row_has_its_own_peak(on_gpu):
    lives = (72, 772, 264)
    rows = [
        Row(name, "", allocated_peak=live * MIB, physical_peak=2 * live * MIB, hold_ratio=2.0,
            host_ns_a_step=1e6, step_ns=1e6)
        for name, live in zip(("default", "expandable", "gruyere"), lives)
    ]  # fmt: skip
    differs = differing(*[(live, live, 8) for live in lives])
    program = Program("train.py", [], None, rows, comparable=False, differs=differs)
    facts = {"device": "NVIDIA H100 80GB HBM3", "stand_in": not on_gpu}
    report = Report(facts, {"fit": True, "ranks": None, "runs": 1}, [program], 1.0)
    text = table.markdown(report)
    first = text.split("\n\n")[0].replace("\n", " ")
    assert first.startswith("The runs did different work, so their figures do not compare: peak ")
    assert "264 MiB under Gruyère. Seed what the program draws at random (torch.man" in first
    assert "free memory" in first
    assert "holds" not in text and "least" not in text
    cells = [
        [cell.strip() for cell in line.split("|")[2:6]]
        for line in text.splitlines() if line.startswith("|")
    ][2:]  # fmt: skip
    assert cells == [
        [f"{live} MiB", table.size(2 * live * MIB), "+100.0%", "-"] for live in lives
    ]
    assert max(map(len, text.splitlines())) <= 80
    # The wide table says the same above its rows.
    wide = table.draw(report)
    assert "different work" in wide.partition("─")[0]
    assert [f" {live} MiB " in wide for live in lives] == [True] * 3
    assert report.code() == 1


@pytest.mark.parametrize(
    ("nanoseconds", "lag"),
    [("20000", "kernels of 20 us"), ("500", "kernels of 0.5 us"), ("0", "done at once"),
     ("soon", "kernels of 'soon' ns")],
)  # fmt: skip
def test_the_stand_ins_clock_is_in_words(nanoseconds, lag):
    assert machine._lag(nanoseconds) == lag


def test_on_the_stand_in_the_last_line_says_on_which():
    last = said(76.5, 64.5, 63.0, on_gpu=False).rstrip().split("\n\n")[-1].replace("\n", " ")
    assert last.startswith("On the NVIDIA H100 80GB HBM3: memory figures are exact"), last
    assert "without the unknown workspaces of NVIDIA's libraries" in last


@pytest.mark.parametrize(
    ("gruyere", "on_gpu", "told"),
    [(FAILED, False, True), (OUT_OF_MEMORY, False, True), (63.0, False, False),
     (FAILED, True, False)],
)  # fmt: skip
def test_a_failure_on_the_stand_in_may_come_from_an_invented_value(gruyere, on_gpu, told):
    text = said(76.5, 64.5, gruyere, on_gpu).replace("\n", " ")
    assert ("invents what a program reads from the device" in text) == told


def a_row(allocator, conf="", outcome=COMPLETED):
    if outcome != COMPLETED:
        return Row(allocator, conf, outcome, LONG)
    return Row(
        allocator, conf, allocated_peak=700 * MIB, physical_peak=754 * MIB, hold_ratio=1.077,
        fit_bytes=740 * MIB, fit_ratio=1.057, host_ns_a_step=1234.5e6, host_ratio=1.02,
        step_ns=1234.5e6,
    )  # fmt: skip


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("conf", ["", "slack:0.1%"])
@pytest.mark.parametrize("outcome", [COMPLETED, FAILED])
def test_the_wide_table_fits_80_columns_too(monkeypatch, on_gpu, conf, outcome):
    monkeypatch.setenv("COLUMNS", "80")
    rows = [a_row("default"), a_row("async", outcome=outcome), a_row("gruyere")]
    rows += [a_row("gruyere", conf)] if conf else []
    programs = [Program("imagenet_resnet.py", [], 700 * MIB, rows), Program("small", [], 0, rows)]
    facts = {"device": "NVIDIA H100 80GB HBM3", "stand_in": not on_gpu}
    text = table.draw(Report(facts, {"fit": True, "runs": 2}, programs, 1.0))
    lines = [line for line in text.splitlines() if "x" * 80 not in line]
    assert max(map(len, lines)) <= 80, text
    # A row that failed says so in the table, and why below it, up to a length.
    reason = "imagenet_resnet.py, async: failed: CUDA out of memory. Tried"
    assert (reason in text) == (outcome == FAILED)
    assert len([line for line in lines if line.endswith("FAILED")]) == 2 * (outcome == FAILED)
    assert max(map(len, text.splitlines())) < 250
    # With room each program is beside its rows.
    monkeypatch.setenv("COLUMNS", "140")
    wide = table.draw(Report(facts, {"fit": True, "runs": 2}, programs, 1.0))
    assert "imagenet_resnet.py  default" in wide and "imagenet_resnet.py  default" not in text
    words = [set(drawn.replace("─", " ").split()) for drawn in (text, wide)]
    assert words[0] - {"+"} == words[1], "no word and no figure is lost"


def test_the_settings_of_gruyeres_row_are_in_its_name_in_a_sentence():
    assert table.called(a_row("gruyere", "slack:0.1%")) == "Gruyère slack:0.1%"
    assert table.called(a_row("gruyere")) == "Gruyère"
    assert table.called(a_row("default")) == "torch default"


def contenders(monkeypatch, conf):
    """The rows of `gruyere compare` in an environment with this GRUYERE_CONF."""
    found = []
    monkeypatch.setattr(compare, "_end", lambda request, command: found.append(request))
    monkeypatch.setattr("gruyere._native.conf.check", lambda _: None)
    monkeypatch.setenv("GRUYERE_CONF", conf)
    compare.compare(json.dumps({"script": __file__, "arguments": []}))
    return [one.name for one in compare.checked(found[0], compare.COMPARE)]


def test_what_is_advised_can_be_tried_with_the_same_command(monkeypatch):
    assert contenders(monkeypatch, "") == ["default", "expandable", "gruyere"]
    assert contenders(monkeypatch, "slack:0.1%")[2:] == ["gruyere slack:0.1%"]
    rows = [a_row("default"), a_row("expandable"), a_row("gruyere", "slack:0.1%")]
    program = Program("train.py", [], 700 * MIB, rows)
    text = table.markdown(Report(FACTS, {"ranks": None}, [program], 1.0))
    assert "Gruyère's row has the settings of GRUYERE_CONF here: slack:0.1%." in text
    assert "| **Gruyère**      |" in text


@pytest.mark.parametrize("part", list(parts.REASONS))
def test_a_part_that_explains_half_of_what_is_held_more_is_the_reason(part):
    half = GIB // 4
    others = {name: half - 1 for name in parts.REASONS}
    text = said(76.5, 62.5, 63.0, found={**others, part: half}).replace("\n", " ")
    reason = parts.REASONS[part]
    assert f"(0.8%) more: {reason.says.format('256 MiB')}. {reason.remedy.rstrip('.')}." in text
    # One that explains less is no reason, and where Gruyère holds least there is none to give.
    for none in (said(76.5, 62.5, 63.0, found=others), said(76.5, 64.5, 63.0, found={part: GIB})):
        assert all(reason.remedy not in none for reason in parts.REASONS.values())


def looked_at(looks, live_peak, held_peak):
    """What a sampler finds that makes these looks."""
    asleep = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: False))
    sampler = parts.Sampler(asleep)
    for look in looks:
        sampler.note(SimpleNamespace(**{**dict.fromkeys(ZEROS, 0), **look}))
    return sampler.parts(live_peak, held_peak)


ZEROS = (
    "reserved",
    "reserved_peak",
    "live",
    "pending",
    "idle",
    "arena_free",
    "slab_free",
    "captured",
)


def test_each_part_is_what_the_heap_says_where_most_was_live():
    low = {"reserved": 40, "reserved_peak": 40, "live": 10, "slab_free": 30}
    peak = {"reserved": 100, "reserved_peak": 100, "live": 50, "pending": 5, "idle": 20,
            "arena_free": 25, "slab_free": 8, "captured": 60}  # fmt: skip
    after = {**peak, "live": 20, "slab_free": 38}
    found = looked_at([low, peak, after], 50, 100)
    # Of 100 held, 50 are live, 5 wait, 25 lie in the arena and 8 in slabs: 12 are with the graphs.
    assert found == {"start": 0, "small": 8, "pieces": 5, "streams": 5, "graphs": 12, "idle": 20}
    # Where nothing was taken after the first growth, what lies idle is of the start.
    first = looked_at([peak], 50, 100)
    assert (first["start"], first["idle"]) == (20, 0)
    # A second peak of about as much finds idle what the first one had to take.
    again = {**peak, "live": 51, "idle": 24}
    assert looked_at([low, peak, low, again], 51, 100)["pieces"] == 5
    grown = {**again, "reserved": 110, "reserved_peak": 110, "live": 49}
    assert looked_at([low, peak, grown], 50, 110)["pieces"] == 1
    # A look far from the peaks says nothing of them.
    assert looked_at([low, peak], 60, 100) == looked_at([peak], 50, 110) == {}
    assert looked_at([], 1, 1) == {}


def test_a_sampler_ends_and_wakes_no_cuda():
    begun = []
    cuda = SimpleNamespace(is_initialized=lambda: False, _lazy_call=begun.append)
    sampler = parts.Sampler(SimpleNamespace(cuda=cuda))
    sampler.start()
    assert not sampler.thread.is_alive() and sys.getprofile() is None
    # CUDA comes up.
    begun[0]()
    time.sleep(0.01)
    assert sys.getprofile() is not None
    assert sampler.parts(1, 1) == {}
    sampler.thread.join(5)
    assert not sampler.thread.is_alive() and sys.getprofile() is None


def test_on_a_gpu_the_last_line_says_how_much_more_of_it_was_in_use():
    last = said(76.5, 64.5, 63.0, on_gpu=True).rstrip().split("\n\n")[-1].replace("\n", " ")
    assert "memory in use grew by 220 MiB to 222 MiB" in last, last
    assert "grew by" not in said(OUT_OF_MEMORY, FAILED, FAILED, on_gpu=True)


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("default", [76.5, OUT_OF_MEMORY])
def test_the_table_and_its_words_fit_80_columns(on_gpu, default):
    text = said(default, 64.5, 63.0, on_gpu)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({len(row) for row in rows}) == 1, "columns stand below each other"
    assert [row.count("|") for row in rows] == [7] * 5
    words = [line for line in text.splitlines() if "x" * 80 not in line]
    assert max(map(len, words)) <= 80, text
    if default == OUT_OF_MEMORY:
        # In the table two words, below it the reason, which has an end.
        assert "ran out" in rows[2] and "CUDA" not in rows[2]
        assert "torch default: out of memory: CUDA out of memory. Tried" in text
        assert len(text) < 1200, text


def test_what_other_libraries_took_is_not_laid_to_the_allocators():
    told = "Of what is held, 2.00 GiB or more is no allocator's: other libraries of the program"
    assert told in " ".join(said(76.5, 64.5, 63.0, beside=2 << 10).split())
    assert "no allocator's" not in said(76.5, 64.5, 63.0)
    one = said(OUT_OF_MEMORY, 64.5, 63.0, beside=2 << 10)
    assert "no allocator's" in one
