"""What a notebook's user reads of an out-of-memory."""

import subprocess

import pytest

from conftest import HERE, launched_environment
from framework_runs import PYTHON


@pytest.mark.parametrize("kind", ["terminal", "jupyter"])
def test_a_line_is_named_by_its_cell(kind, tmp_path):
    ran = subprocess.run(
        [PYTHON, HERE / "frameworks" / "notebook.py", kind],
        env=launched_environment(tmp_path, PHANTOM_MEMORY="1GiB", IPYTHONDIR=str(tmp_path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        timeout=300,
    )
    said = ran.stdout.partition("ENDS ")[2]
    assert "In[2]:3 in batch keeps" in said, f"{ran.stdout}\n{ran.stderr}"
    assert "(no step is marked)" in said
    assert "ipykernel" not in said and "ipython-input" not in said
