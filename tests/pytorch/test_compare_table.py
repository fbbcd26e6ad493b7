"""`gruyere compare` is fair where a run did not complete, and no wider than a terminal."""

import pytest

from gruyere._bench import table
from gruyere._bench.compare import Program, Report, Row
from gruyere._bench.measure import COMPLETED, FAILED, OUT_OF_MEMORY

GIB = 1 << 30
# torch's sentence, as one line.
LONG = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of " + "x" * 900


def said(default, expandable, gruyere, on_gpu=False):
    """The text for these rows: GiB that they held, or how they ended."""
    rows = []
    for name, found in zip(("default", "expandable", "gruyere"), (default, expandable, gruyere)):
        if isinstance(found, str):
            rows.append(Row(name, "", found, LONG))
        else:
            held = int(found * GIB)
            times = {"host_ns_a_step": 123.4e6, "step_ns": 1234.5e6}
            rows.append(Row(name, "", physical_peak=held, hold_ratio=found / 62.5, **times))
    program = Program("train.py", ["--batch-size", "8"], peak_live=int(62.5 * GIB), rows=rows)
    machine = {"device": "NVIDIA H100 80GB HBM3", "stand_in": not on_gpu, "torch": "2.11.0+cu130",
               "cuda": "13.0"}  # fmt: skip
    return table.markdown(Report(machine, {}, [program], 512.0))


@pytest.mark.parametrize(
    ("rows", "conclusion"),
    [
        ((76.5, 64.5, 63.0), "Gruyère holds 1.50 GiB (2.3%) less than torch's best (expandable)."),
        ((76.5, 62.5, 63.0), "torch's expandable holds 512 MiB (0.8%) less than Gruyère here."),
        (
            (OUT_OF_MEMORY, 70.0, 63.0),
            "torch's default ran out of memory. Beside expandable, which completed, Gruyère holds "
            "7.00 GiB (10.0%) less.",
        ),
        (
            (76.5, FAILED, 63.0),
            "torch's expandable failed. Beside default, which completed, Gruyère holds 13.50 GiB "
            "(17.6%) less.",
        ),
        (
            (OUT_OF_MEMORY, FAILED, 63.0),
            "Gruyère completed, and nothing else did: torch's default ran out of memory and "
            "expandable failed.",
        ),
        ((76.5, 64.5, FAILED), "Gruyère did not complete: default and expandable of torch did."),
        ((FAILED, FAILED, FAILED), "Gruyère did not complete, nor did torch's allocators."),
    ],
)
def test_what_did_not_complete_is_no_base_for_less_and_more(rows, conclusion):
    text = said(*rows)
    assert conclusion in text.replace("\n", " "), text
    assert ("best" in text) == ("best" in conclusion)


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
