"""What a notebook's user reads of an out-of-memory."""

import re
import subprocess

import pytest

from conftest import HERE, launched_environment
from framework_runs import PYTHON


def ends(kind, what, folder):
    """How the last cell ended, and what was live when its exception was let go of."""
    ran = subprocess.run(
        [PYTHON, HERE / "frameworks" / "notebook.py", kind, what],
        env=launched_environment(folder, PHANTOM_MEMORY="1GiB", IPYTHONDIR=str(folder)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        timeout=300,
    )
    said, _, live = ran.stdout.partition("ENDS ")[2].partition("LIVE ")
    assert live, f"{ran.stdout}\n{ran.stderr}"
    return said, int(live.split()[0])


@pytest.mark.parametrize("kind", ["terminal", "jupyter"])
def test_a_line_is_named_by_its_cell(kind, tmp_path):
    said, _ = ends(kind, "leak", tmp_path)
    assert "In[2]:3 in batch keeps" in said
    assert "(no step is marked)" in said
    assert "ipykernel" not in said and "ipython-input" not in said


@pytest.mark.parametrize("kind", ["terminal", "jupyter"])
def test_what_a_cell_runs_in_turn_is_of_that_cell_and_what_nobody_sees_of_none(kind, tmp_path):
    said, _ = ends(kind, "nested", tmp_path)
    assert re.search(r"Most is from (\S+/)?In\[2\]:1: 768 MiB", said), said
    assert re.search(r"then from (\S+/)?In\[4\]:1: 32 MiB", said), said
    (unseen,) = re.findall(r"then from (\S+): 64 MiB", said)
    assert "In[" not in unseen, said
    assert "In[3]:" not in said and "In[5]:" not in said, said


def test_what_a_failed_cell_has_left_is_told_and_the_advice_frees_it(tmp_path):
    said, live = ends("jupyter", "retry", tmp_path)
    assert "is left of an attempt that ran out of memory before" in " ".join(said.split())
    assert "run `1/0` in a cell of its own" in " ".join(said.split())
    # The weights.
    assert live < 40 << 20
