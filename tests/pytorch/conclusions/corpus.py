"""Programs whose memory goes for a known cause, and whether the conclusion that Gruyère draws is
right: `cargo xtask conclusions` runs all of them and writes the table (README.md),
test_conclusions_corpus.py sixteen.

Each program says in its docstring, after an empty line, what is true of it:

    cause:  a word of CAUSES
    also:   other causes that are as right
    device: the size of the GPU
    ends:   oom, or killed (it kills itself)
    never:  a regular expression of advice that would do harm

and marks with `# the cause` the lines that cause it: where something is kept, and where what is
kept is made, which is what an allocator can see. Those of all folders but `known/` were written by
people who did not know the rules of the conclusion; README.md has the score of each at first sight.

    right    the cause is one of those given; where lines are marked, the sentence that names the
             cause names one of them; no advice matches `never`
    silent   no cause is named, only what is held, and there is one
    wrong    anything else
"""

import argparse
import collections
import concurrent.futures
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from conftest import COMMAND, clean_environment, launched_environment  # noqa: E402

# What a program's author says, by what `Cause` of the record crate is called.
CAUSES = {
    "leak": "grows",
    "autograd_graphs": "graph",
    "hooks": "hooks",
    "no_grad": "no_grad",
    "collected": "collects",
    "cache": "cache",
    "full": "too_large",
    "large_request": "one_tensor",
    "pieces": "pieces",
    "others": "other_process",
    "ceiling": "ceiling",
    "cuda_graphs": "cuda_graphs",
    "streams": "streams",
    "optimizer_twice": "optimizer_twice",
    "nothing": "nothing",
}
# Of these nobody is accused.
SILENT = ("too_large", "nothing")
MARK = "# the cause"
RIGHT, QUIET, WRONG = "right", "silent", "wrong"
# Of programs with a cause, silent at most: one in so many.
MOST_SILENT = 8
# What a folder scored when its programs were first run, by rules that had not seen them, with the
# marks that its author had set: right, silent, wrong.
FIRST_SIGHT = {
    "fresh": (13, 3, 8),
    "second": (13, 0, 1),
    "third": (5, 0, 5),
    "fourth": (8, 1, 2),
    "fifth": (4, 1, 3),
    "sixth": (12, 3, 7),
    # Servers and a job of two ranks, as judged in the trial; here cut to what matters.
    "seventh": (1, 0, 6),
    # Of a trial with 97 programs (44 right, 16 silent, 37 wrong), mostly those that went wrong.
    "eighth": (3, 2, 20),
    # After the faults of two trials: models that are copied or moved, and kept.
    "ninth": (1, 0, 4),
    # After the faults that a trial with vision programs found, and two that nothing is wrong with.
    "tenth": (2, 1, 3),
    # The same of trials with fine-tuning and with notebooks; and a server that nothing misled.
    "eleventh": (1, 0, 9),
    # The same of trials with servers, with training frameworks and with a fleet.
    "twelfth": (0, 1, 7),
}
# A program that takes longer hangs.
SECONDS = 300


@dataclass
class Program:
    path: Path
    about: str
    true: dict

    @property
    def name(self):
        return f"{self.path.parent.name}/{self.path.stem}"

    @property
    def causes(self):
        return [self.true["cause"], *re.findall(r"\w+", self.true.get("also", ""))]

    @property
    def marked(self):
        lines = self.path.read_text().splitlines()
        return [number for number, line in enumerate(lines, 1) if line.endswith(MARK)]


def read(path):
    """The program at `path`, with what its docstring says."""
    about, _, header = path.read_text().split('"""')[1].partition("\n\n")
    true = dict(re.findall(r"^(\w+):\s*(.+?)\s*$", header, re.MULTILINE))
    program = Program(path, " ".join(about.split()), true)
    unknown = set(true) - {"cause", "also", "device", "ends", "never"}
    unknown |= set(program.causes) - set(CAUSES.values())
    if unknown or true.get("ends") not in ("oom", "killed") or "device" not in true:
        raise ValueError(f"{path}: the docstring says {true}, {unknown or 'ends, device'}?")
    return program


def programs():
    return [read(path) for path in sorted(HERE.glob("*/*.py"))]


@dataclass
class Told:
    """What the tool said of a program."""

    cause: str
    # What the person reads: of an exception all of it after torch's own sentence.
    text: str
    # The first sentence of the conclusion.
    first: str


def sentence(lines):
    """The first sentence: later lines of it are indented."""
    more = itertools.takewhile(lambda line: line.startswith("  "), lines[1:])
    return " ".join([lines[0], *(line.strip() for line in more)])


def run(program, folder, conf="", **settings):
    """Runs it on the stand-in; what its exception says, or `gruyere post` where it was killed."""
    records, dumps = folder / "records", folder / "dumps"
    records.mkdir()
    size = program.true["device"].replace(" ", "")
    # Its threads spin where cores are few.
    settings = {"OMP_NUM_THREADS": "1"} | settings
    environment = launched_environment(
        records, GRUYERE_CONF=f"dump_dir:{dumps}{conf}", PHANTOM_MEMORY=size, **settings
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "gruyere", program.path],
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"{program.name} ran for {SECONDS} s\n{out}\n{err}") from None
    if program.true["ends"] == "killed":
        assert process.returncode == -9, f"{program.name} ended with {process.returncode}\n{err}"
        words = [COMMAND, "post", str(process.pid), "--directory", records, "--json"]
        posted = subprocess.run(words, env=clean_environment(), capture_output=True, text=True)
        assert posted.returncode in (0, 3), f"{program.name}: {posted.stderr}"
        said = json.loads(posted.stdout)["conclusion"]
        text = "\n".join(said["lines"])
    else:
        # torch 2.15 may abort at the end, after the exception was shown (docs/pytorch.md).
        _, found, text = err.rpartition("OutOfMemoryError: CUDA out of memory.")
        assert process.returncode != 0 and found, f"{program.name} did not run out\n{out}\n{err}"
        _, _, text = text.partition("\n")
        # Two within a tick of the clock differ in their number.
        last = max(dumps.glob("*.json"), key=lambda path: (path.stat().st_mtime_ns, path.name))
        said = json.loads(last.read_text())["conclusion"]
    cause = CAUSES.get(said["cause"], said["cause"])
    return Told(cause, text, sentence(said["lines"]))


def judge(program, told):
    """RIGHT, QUIET or WRONG, and why."""
    advice = program.true.get("never")
    if advice and re.search(advice, told.text, re.IGNORECASE):
        return WRONG, "harmful advice: " + re.search(advice, told.text, re.IGNORECASE).group()
    if told.cause not in program.causes:
        if told.cause in SILENT:
            return QUIET, ""
        return WRONG, f"takes it for {told.cause}"
    named = [int(line) for line in re.findall(rf"{program.path.name}:(\d+)", told.first)]
    if program.marked and not set(named) & set(program.marked):
        if named:
            return WRONG, f"accuses line {named[0]}, not {program.marked[0]}"
        return QUIET, "names no line"
    return RIGHT, ""


def score(verdicts):
    """The counts, and whether they will do: none wrong, and silent on at most one in eight."""
    counts = collections.Counter(verdicts)
    will_do = counts[WRONG] == 0 and counts[QUIET] * MOST_SILENT <= sum(counts.values())
    return counts, will_do


def row(program, told, verdict, why):
    said = told.first.replace("|", "\\|")
    return (
        f"| `{program.name}` | {program.true['cause']} | {verdict}{why and ': ' + why} | {said} |"
    )


def table(results):
    """README.md: the score, then each program with what was said of it."""
    folders = sorted({program.path.parent.name for program, *_ in results}, reverse=True)
    lines = [
        "# The conclusion, on programs whose cause is known",
        "",
        "Written by `cargo xtask conclusions`; what the words mean is in [corpus.py](corpus.py).",
        "The programs of all folders but `known/` were written without knowledge of the",
        "rules. *At first sight*: what they scored when they were first run, before the rules were",
        "tuned on them, with their author's marks (in `fresh/` those of lines that keep, not of",
        "lines that make what is kept, which are all that an allocator sees).",
        "",
        "| | programs | right | silent | wrong | at first sight |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for folder in [*folders, None]:
        verdicts = [v for p, _, v, _ in results if folder in (None, p.path.parent.name)]
        counts, _ = score(verdicts)
        numbers = [len(verdicts), *(counts[word] for word in (RIGHT, QUIET, WRONG))]
        sight = FIRST_SIGHT.get(folder)
        first = "{} right, {} silent, {} wrong".format(*sight) if sight else ""
        lines.append(f"| {folder or 'all'} | {' | '.join(map(str, numbers))} | {first} |")
    lines += ["", "| program | cause | | the first sentence |", "|---|---|---|---|"]
    lines += [row(*result) for result in results]
    return "\n".join(lines) + "\n"


def of_one(program, conf):
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            told = run(program, Path(folder), conf)
            verdict, why = judge(program, told)
        except AssertionError as error:
            told = Told("", "", str(error).splitlines()[0])
            verdict, why = WRONG, "did not run as it says"
            print(error, file=sys.stderr)
    seconds = time.monotonic() - begun
    print(f"{verdict:<7}{program.name:<36}{seconds:5.1f} s  {why}", flush=True)
    if verdict != RIGHT:
        print("    " + (told.text.strip() or told.first).replace("\n", "\n    "), flush=True)
    return program, told, verdict, why


def main():
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    arguments.add_argument(
        "names", nargs="*", help="only programs whose names contain one of these"
    )
    arguments.add_argument("--door", choices=["native", "pluggable"], help="torch's door (auto)")
    arguments.add_argument(
        "--show", action="store_true", help="show what is said of right ones too"
    )
    asked = arguments.parse_args()
    chosen = [p for p in programs() if not asked.names or any(n in p.name for n in asked.names)]
    conf = f",door:{asked.door}" if asked.door else ""
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        results = list(pool.map(lambda program: of_one(program, conf), chosen))
    if asked.show:
        for program, told, *_ in results:
            print(f"\n{program.name}\n{told.text.strip()}")
    counts, will_do = score([verdict for _, _, verdict, _ in results])
    if not asked.names:
        (HERE / "README.md").write_text(table(results))
    print(
        f"{len(results)} programs: " + ", ".join(f"{counts[w]} {w}" for w in (RIGHT, QUIET, WRONG))
    )
    sys.exit(not will_do)


if __name__ == "__main__":
    main()
