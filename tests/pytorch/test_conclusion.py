"""What `gruyere post` says first of a program with a planted cause (programs/conclusions): the
cause, and the line. And of programs to which nothing is wrong, that nothing is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import COMMAND, HERE, clean_environment, launched_environment

PROGRAMS = HERE / "programs" / "conclusions"


class Planted:
    """A folder in which planted programs run, each killed in the end."""

    def __init__(self, folder):
        self.folder = folder
        self.records = folder / "records"
        self.records.mkdir()

    def start(self, name, conf=None, **settings):
        if conf:
            settings["GRUYERE_CONF"] = conf
        environment = launched_environment(self.records, **settings)
        return subprocess.Popen(
            [sys.executable, "-m", "gruyere", PROGRAMS / f"{name}.py"],
            env=environment,
            cwd=self.folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def post(self, process, *arguments):
        words = [COMMAND, "post", str(process.pid), "--directory", self.records, *arguments]
        # As wide as no line is wrapped.
        wide = clean_environment() | {"COLUMNS": "200"}
        ran = subprocess.run(words, env=wide, capture_output=True, text=True)
        assert ran.returncode in (0, 3), ran.stderr
        return ran.stdout

    def conclusion(self, name, **settings):
        """What post says of the program: the cause, and the lines."""
        process = self.start(name, **settings)
        out, err = process.communicate(timeout=120)
        assert process.returncode == -9, (out, err)
        page = self.post(process)
        told = json.loads(self.post(process, "--json"))["conclusion"]
        assert page.startswith("".join(line + "\n" for line in told["lines"]) + "\n")
        assert len(told["lines"]) <= 10 and all(len(line) <= 100 for line in told["lines"])
        assert len(page.splitlines()) <= 60, page
        print(page)
        return told["cause"], told["lines"]


@pytest.fixture
def planted(tmp_path):
    return Planted(tmp_path)


def suspect(name, mark="# the suspect"):
    """Where a program has the marked line, as post names it."""
    lines = (PROGRAMS / f"{name}.py").read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if line.endswith(mark)]
    return f"{name}.py:{number}"


def test_a_leak_of_64_mib_a_step_is_named_with_its_line(planted):
    cause, (first, *_) = planted.conclusion("leak")
    assert cause == "leak"
    assert first.startswith(f"{suspect('leak')} in remember keeps 64 MiB a step since step 3: ")


def test_losses_that_are_kept_with_their_graphs(planted):
    cause, (first, *_) = planted.conclusion("losses")
    assert cause == "autograd_graphs"
    assert first.startswith(f"{suspect('losses')} keeps graphs of past steps, "), first


def test_a_cache_without_bound(planted):
    cause, (first, *_) = planted.conclusion("cache")
    assert cause == "cache"
    assert first.startswith(f"{suspect('cache')} in mask fills a cache without bound, "), first


def test_activations_that_hooks_keep(planted):
    cause, (first, *_) = planted.conclusion("hooks")
    assert cause == "hooks"
    said = f"{suspect('hooks')} in train keeps outputs of 8 modules (hooks, a cache, "
    assert first.startswith(said), first


def test_an_evaluation_that_forgot_no_grad(planted):
    cause, (first, *_) = planted.conclusion("no_grad")
    assert cause == "no_grad"
    assert first.startswith(f"{suspect('no_grad')} in evaluate keeps the graphs of "), first
    assert "torch.no_grad()" in first


def test_states_of_an_optimiser_that_are_there_twice(planted):
    cause, (first, *_) = planted.conclusion("optimizer_twice")
    assert cause == "optimizer_twice"
    assert first.startswith("The states of an optimiser are there twice, made in steps 0 and 5")


def test_a_rank_that_holds_more_than_the_others(planted):
    ranks = [
        planted.start("ranks", RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE="3") for rank in range(3)
    ]
    try:
        for process in ranks:
            assert process.stdout.readline() == "ready\n", process.stderr.read()
        for process in ranks:
            process.kill()
            process.wait()
        for rank, process in enumerate(ranks):
            told = json.loads(planted.post(process, "--json"))["conclusion"]
            assert told["cause"] == "uneven_ranks"
            this = "(this one)" if rank == 2 else f"(this is rank {rank})"
            assert told["lines"][0].startswith(f"Rank 2 {this} had 2."), told
    finally:
        for process in ranks:
            process.kill()


def test_one_large_request_in_the_dump_and_in_post(planted):
    dumps = planted.folder / "dumps"
    cause, (first, *_) = planted.conclusion(
        "large_request", conf=f"dump_dir:{dumps}", PHANTOM_MEMORY="8GiB"
    )
    assert cause == "large_request"
    # The record alone knows the line of the refused request, too.
    line = f"{suspect('large_request')} in scores asks for 16 GiB at once"
    assert first.startswith(line), first
    (text,) = dumps.glob("*.txt")
    (data,) = dumps.glob("*.json")
    head, said, *_ = text.read_text().splitlines()
    assert head.startswith("CUDA out of memory. Tried to allocate 16.00 GiB."), head
    assert said.startswith(line), said
    assert json.loads(data.read_text())["conclusion"]["lines"][0] == said


def test_the_exception_ends_with_the_path_of_its_page_which_has_the_line_and_its_source(planted):
    dumps = planted.folder / "dumps"
    process = planted.start("leak", conf=f"dump_dir:{dumps}", PHANTOM_MEMORY="1GiB")
    _, err = process.communicate(timeout=120)
    _, _, message = err.partition("OutOfMemoryError: CUDA out of memory. Tried to allocate ")
    (page,) = dumps.glob("*.html")
    # Below it, that the record was kept.
    *_, last, kept = message.splitlines()
    said = f"gruyere: `gruyere post {process.pid}` shows"
    assert last == f"The page: {page}" and kept.startswith(said), message
    assert page.stat().st_mode & 0o777 == 0o600
    found = page.read_text().split('<script type="application/json" id="facts">')[1]
    facts = json.loads(found.split("</script>")[0])
    assert facts["conclusion"]["lines"][0].startswith(suspect("leak"))
    line = next(line for line in facts["lines"] if line["name"].startswith(suspect("leak")))
    source = line["source"]
    meant = source["lines"][source["line"] - source["first"]]
    assert meant and meant in Path(source["path"]).read_text()
    # All that is live at the end is in the layers, by line, and no more than was live at all.
    end = sum(layer[-1] for layer in facts["course"]["layers"])
    assert 0.9 * facts["device"]["live"] <= end <= facts["device"]["live_peak"] + (1 << 20)


@pytest.mark.parametrize("door", ["native", "pluggable"])
def test_the_exception_names_the_line_that_keeps_memory(planted, door):
    process = planted.start("leak", conf=f"door:{door}", PHANTOM_MEMORY="1GiB")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    _, _, message = err.partition("OutOfMemoryError: CUDA out of memory. Tried to allocate ")
    lines = message.splitlines()
    assert lines[1].startswith(f"{suspect('leak')} in remember keeps 64 MiB a step since step 3: ")
    # What helps where nothing grows would not here.
    assert "a smaller batch" not in message and "To do: find what keeps" in message, message


def test_memory_that_another_has_taken(planted):
    cause, (first, *_) = planted.conclusion("others", PHANTOM_MEMORY="16GiB")
    assert cause == "others"
    assert first.startswith("Others hold at least 1") and "of the 16 GiB of device 0" in first


def test_many_small_graphs(planted):
    cause, (first, *_) = planted.conclusion("graphs")
    assert cause == "cuda_graphs"
    assert first.startswith("Many CUDA graphs have ") and "in 40 pools of their own" in first


def test_record_stream_that_piles_up(planted):
    cause, (first, *_) = planted.conclusion("streams")
    assert cause == "streams"
    assert "is freed and waits for stream" in first, first
    assert suspect("streams") in first, first


def test_a_healthy_program_is_accused_of_nothing(planted):
    cause, (first, *more) = planted.conclusion("healthy")
    assert cause == "nothing"
    assert first.startswith("Nothing grows (24 steps)") and more[0].startswith("Most is from ")
    assert not any("To do" in line for line in more)


def test_a_replay_buffer_that_is_full_is_no_leak(planted):
    cause, lines = planted.conclusion("replay_buffer")
    assert cause == "nothing"
    assert any("is level: a queue that is full" in line for line in lines), lines
