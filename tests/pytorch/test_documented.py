"""The launch lines that README and the pages show are understood by `python -m gruyere`. (Commands
of `gruyere`: crates/cli/src/documented.rs.)"""

import json
import re
import shlex
import subprocess
import sys

from conftest import GRUYERE, ROOT, clean_environment

PAGES = ["README.md", "python_loader/README.md", "dashboards/README.md", "docs"]
# Settings and words as the launch line reads them; what it refuses, by line.
READER = """
import json, sys
from gruyere import GruyereError, _launch, _settings, _trial
refused = {}
for line, words in json.load(sys.stdin).items():
    try:
        options = _launch.Options(words)
        _settings.checked(options.settings)
        _trial.steps(options.steps or _trial.ALL)
    except GruyereError as error:
        refused[line] = str(error)
print(json.dumps(refused))
"""


def shown(text):
    """The launch lines on a page, each with the words behind `-m gruyere`."""
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"^    (\S.*?)(?:   .*)?$", text, re.MULTILINE)
    lines += re.findall(r"`([^`\n]+)`", text)
    found = {}
    for line in lines:
        if "-m gruyere " not in line:
            continue
        words = shlex.split(line, comments=True)
        ends = [at for at, word in enumerate(words) if word in ("|", "&", "&&", ">")]
        at = words.index("gruyere") + 1
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


def test_every_launch_line_of_readme_and_the_pages_is_understood():
    lines = {}
    for name in PAGES:
        page = ROOT / name
        pages = [page] if page.is_file() else page.rglob("*.md")
        for page in pages:
            if "decisions" not in page.parts:
                lines |= shown(page.read_text())
    assert len(lines) > 15, lines
    assert refused(lines) == {}


def test_a_launch_line_that_is_not_understood_is_noticed():
    page = "```sh\ntorchrun -m gruyere --limits 90% train.py\n```\n`python -m gruyere --limit`\n"
    assert set(refused(shown(page))) == {
        "torchrun -m gruyere --limits 90% train.py", "python -m gruyere --limit"
    }  # fmt: skip
    right = "    python -m gruyere --trace run-%p.trace.zst train.py     a trace\n"
    assert refused(shown(right)) == {}
