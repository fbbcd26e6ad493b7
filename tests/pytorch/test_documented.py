"""What README and the pages show is understood: launch lines by `python -m gruyere`, GPUs and
sweeps by the dry run. (The other words of the commands of `gruyere`:
crates/cli/src/documented.rs.)"""

import json
import re
import shlex
import subprocess
import sys

import pytest

from conftest import GRUYERE, ROOT, clean_environment

sys.path.insert(0, str(ROOT / "python_loader"))

from gruyere import GruyereError  # noqa: E402
from gruyere._dryrun import gpus  # noqa: E402
from gruyere._dryrun.sweep import Sweep  # noqa: E402

PAGES = ["README.md", "python_loader/README.md", "dashboards/README.md", "docs"]
# Settings and words as the launch line reads them; what it refuses, by line.
READER = """
import json, sys
from gruyere import GruyereError, _launch, _trial
from gruyere._native import conf
refused = {}
for line, words in json.load(sys.stdin).items():
    try:
        options = _launch.Options(words)
        conf.checked(options.settings)
        _trial.steps(options.steps or _trial.ALL)
    except GruyereError as error:
        refused[line] = str(error)
print(json.dumps(refused))
"""


def shown(text, command="-m gruyere "):
    """The launch lines on a page, each with the words behind `-m gruyere` (or another command)."""
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"^    (\S.*?)(?:   .*)?$", text, re.MULTILINE)
    lines += re.findall(r"`([^`\n]+)`", text)
    found = {}
    for line in lines:
        if command not in line:
            continue
        words = shlex.split(line, comments=True)
        ends = [at for at, word in enumerate(words) if word in ("|", "&", "&&", ">")]
        at = words.index(command.split()[-1]) + 1
        found[line] = words[at : min(ends, default=len(words))]
    return found


def refused(lines):
    ran = subprocess.run(
        [sys.executable, "-c", READER],
        input=json.dumps(lines),
        env=clean_environment()
        | {"PYTHONPATH": str(ROOT / "python_loader"), "GRUYERE_LIBRARY": str(GRUYERE)},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(ran.stdout)


def shown_by_all(*command):
    lines = {}
    for name in PAGES:
        page = ROOT / name
        pages = [page] if page.is_file() else page.rglob("*.md")
        for page in pages:
            if "decisions" not in page.parts:
                lines |= shown(page.read_text(), *command)
    return lines


def check_dryrun(words):
    """Raises GruyereError if a GPU or the sweep of a dry run is none."""
    for at, word in enumerate(words[:-1]):
        if word == "--gpu":
            gpus.chosen([name for name in words[at + 1].split(",") if name != gpus.LIST], [], None)
        if word == "--sweep":
            Sweep(words[at + 1], tuple(words[at + 2 :]))


def test_every_gpu_and_sweep_of_readme_and_the_pages_is_one():
    lines = shown_by_all("gruyere dryrun ")
    assert len(lines) > 5, lines
    for words in lines.values():
        check_dryrun(words)


@pytest.mark.parametrize(
    "page",
    [
        "`gruyere dryrun --gpu a100-39 train.py`",
        "```sh\ngruyere dryrun --sweep batch=8..1 train.py {batch}\n```",
        "    gruyere dryrun --sweep batch=1,2 train.py",
    ],
)
def test_a_gpu_or_sweep_that_is_none_is_noticed(page):
    (words,) = shown(page, "gruyere dryrun ").values()
    with pytest.raises(GruyereError):
        check_dryrun(words)


def test_every_launch_line_of_readme_and_the_pages_is_understood():
    lines = shown_by_all()
    assert len(lines) > 15, lines
    assert refused(lines) == {}


def test_a_launch_line_that_is_not_understood_is_noticed():
    page = "```sh\ntorchrun -m gruyere --limits 90% train.py\n```\n`python -m gruyere --limit`\n"
    assert set(refused(shown(page))) == {
        "torchrun -m gruyere --limits 90% train.py", "python -m gruyere --limit"
    }  # fmt: skip
    right = "    python -m gruyere --trace run-%p.trace.zst train.py     a trace\n"
    assert refused(shown(right)) == {}
