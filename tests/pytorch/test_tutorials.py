"""The tutorials' own words and programs, as a reader would run them: on the stand-in GPU, with the
torch that is installed (`plain --tests` runs this with the newest)."""

import re
import sys

import pytest

from conftest import ROOT
from newcomer import Newcomer

TUTORIALS = ROOT / "docs" / "tutorials"


def blocks(name, language):
    """The code of a tutorial in that language."""
    text = (TUTORIALS / name).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_the_first_run_and_its_comparison(tmp_path):
    (printed,) = blocks("first-run.md", "python")
    reader = Newcomer(
        tmp_path,
        "import sys, torch\n"
        "assert sys.argv[1:] == ['--epochs', '1']\n"
        "model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)]).cuda()\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "for step in range(20):\n"
        "    model(torch.randn(64, 512, device='cuda')).sum().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n" + printed,
    )
    program = ["train.py", "--epochs", "1"]
    options = ["--summary", "on", "--stand-in", "--steps", "all"]
    ran = reader.run(sys.executable, "-m", "gruyere", *options, *program)
    assert ran.returncode == 0, ran.stderr
    assert re.search(r"^\d+ \d+ MiB$", ran.stdout, re.MULTILINE), ran.stdout
    assert re.search(r"^gruyere: peak live .*, held .* driver calls", ran.stderr, re.MULTILINE)
    compared = reader.command("compare", "--stand-in", "--", sys.executable, *program)
    assert compared.returncode == 0, compared.stderr
    for name in ("torch default", "torch expandable", "**Gruyère**"):
        assert name in compared.stdout


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The program of the first leak, which has run out of memory: its reader, and what it said."""
    (program,) = blocks("first-leak.md", "python")
    reader = Newcomer(tmp_path_factory.mktemp("leak"), program)
    (reader.folder / "dumps").mkdir()
    ran = reader.run(
        *(sys.executable, "-m", "gruyere", "--stand-in", "--steps", "all", "train.py"),
        PHANTOM_MEMORY="1GiB",
        GRUYERE_CONF=f"dump_dir:{reader.folder / 'dumps'}",
    )
    assert ran.returncode == 1 and "OutOfMemoryError: CUDA out of memory" in ran.stderr, ran.stderr
    return reader, ran.stderr


def told():
    """What the tutorial says of that program: its line, and what it keeps."""
    (first, *_) = blocks("first-leak.md", "text")[0].splitlines()
    return re.match(r"train\.py:\d+ keeps \d+ MiB a step", first)[0]


def test_the_first_leak_is_told_with_its_line(ended):
    reader, said = ended
    assert told() in said, said
    (record,) = (reader.folder / "records").glob("*.record")
    post = reader.command("post", record)
    assert post.returncode == 0, post.stderr
    assert told() in post.stdout, post.stdout


def test_the_first_out_of_memory_leaves_the_dump_that_is_asked_for(ended):
    reader, said = ended
    dumps = sorted((reader.folder / "dumps").iterdir())
    assert {".html", ".txt", ".json", ".pickle"} <= {path.suffix for path in dumps}, dumps
    (page,) = re.findall(r"The page: (\S+)", said)
    assert page in map(str, dumps)
    text = next(path for path in dumps if path.suffix == ".txt").read_text()
    assert told() in text and "The largest live blocks" in text, text


def test_how_much_memory_is_missing_is_answered_without_a_gpu(tmp_path):
    (program,) = blocks("first-leak.md", "python")
    reader = Newcomer(tmp_path, program)
    (line,) = [line for line in blocks("first-out-of-memory.md", "sh") if "dryrun" in line]
    *words, script = line.split()
    ran = reader.command(*words[1:], "--", sys.executable, script)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for name in ("gruyere", "torch", "expandable", "smallest GPU"):
        assert name in ran.stdout, ran.stdout
