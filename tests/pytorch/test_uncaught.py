"""A program that ends by an out-of-memory which nobody catches leaves its record for `gruyere
post`; one that catches it, and one that ends by another error, leave none."""

import json
import re
import subprocess
import sys

import pytest

from conftest import COMMAND, clean_environment, launched_environment

LEAK = """
import torch
kept = []
def remember():
    kept.append(torch.ones(64 << 20, dtype=torch.uint8, device="cuda"))
while True:
    remember()
"""
LARGE = """
import torch
weights = torch.ones(64 << 20, dtype=torch.uint8, device="cuda")
def scores(length):
    return torch.ones(length, length, device="cuda")
scores(64)
scores(24 << 10)
"""
CAUGHT = """
import torch
try:
    torch.ones(2 << 30, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    print("goes on")
"""
KILLED = """
try:
    scores(24 << 10)
except torch.OutOfMemoryError:
    import os
    os.kill(os.getpid(), 9)
"""
OTHER = """
import torch
kept = torch.ones(64 << 20, dtype=torch.uint8, device="cuda")
raise ValueError("not memory")
"""
CHILDREN = """
import multiprocessing, sys, gruyere, torch

# In spawned children too.
gruyere.enable()

def work(kind):
    torch.ones((2 << 30) if kind == "fails" else (8 << 20), dtype=torch.uint8, device="cuda")

def work_of_rank(rank, kind):
    work(kind)

if __name__ == "__main__":
    method, kind = sys.argv[1:]
    if method == "torch":
        torch.multiprocessing.spawn(work_of_rank, (kind,), nprocs=2)
    else:
        context = multiprocessing.get_context(method)
        children = [context.Process(target=work, args=(kind,)) for _ in range(2)]
        for child in children:
            child.start()
        for child in children:
            child.join()
        print([child.exitcode for child in children])
"""


def run(folder, code, conf="", arguments=()):
    (folder / "records").mkdir()
    (folder / "program.py").write_text(code)
    environment = launched_environment(folder / "records", GRUYERE_CONF=conf, PHANTOM_MEMORY="1GiB")
    ran = subprocess.run(
        [sys.executable, "-m", "gruyere", "program.py", *arguments],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
    )
    return ran, list((folder / "records").glob("*.record"))


def post(folder, *arguments):
    words = [COMMAND, "post", "--directory", folder / "records", *arguments]
    ran = subprocess.run(words, env=clean_environment(), capture_output=True, text=True)
    assert ran.returncode in (0, 3), ran.stderr
    return ran.stdout


def test_post_finds_what_was_live_at_an_out_of_memory_that_ended_the_program(tmp_path):
    ran, left = run(tmp_path, LEAK)
    assert ran.returncode == 1 and len(left) == 1, ran.stderr
    said = ran.stderr.splitlines()[-1]
    assert re.match(r"gruyere: `gruyere post \d+` shows what was live then", said), said
    page = post(tmp_path)
    assert page.startswith("The process that died last, "), page
    assert "program.py:5 in remember" in page, page
    told = json.loads(post(tmp_path, "--json"))
    assert told["ended"]["last_event_is_out_of_memory"] or told["ended"]["out_of_memories"] == 1
    (device,) = told["state"]["devices"]
    assert device["live"]["all"]["bytes"] > 900 << 20


@pytest.mark.parametrize("copy", ["left by the program", "of a killed one"])
def test_the_record_alone_names_the_line_of_the_refused_request(tmp_path, copy):
    killed = LARGE.replace("scores(24 << 10)", KILLED) if copy == "of a killed one" else LARGE
    ran, left = run(tmp_path, killed)
    assert ran.returncode != 0 and len(left) == 1, ran.stderr
    told = json.loads(post(tmp_path, "--json"))
    assert told["conclusion"]["cause"] == "large_request"
    assert told["conclusion"]["lines"][0].startswith("program.py:5 in scores asks for 2.2 GiB at")
    # Of the events only an out-of-memory has a site; where it is, no block lies.
    entries = told["state"]["events"]["entries"]
    (refused,) = [event for event in entries if event["kind"] == "out_of_memory"]
    assert refused["address"] == 0 and refused["site"] > 0
    assert not [event for event in entries if "site" in event and event is not refused]


@pytest.mark.parametrize("code, exit", [(CAUGHT, 0), (OTHER, 1)])
def test_a_program_that_did_not_die_of_memory_leaves_no_record(tmp_path, code, exit):
    ran, left = run(tmp_path, code)
    assert ran.returncode == exit and not left, ran.stderr
    assert "gruyere post" not in ran.stderr, ran.stderr


def test_with_records_kept_0_none_is_left(tmp_path):
    ran, left = run(tmp_path, LEAK, "records_kept:0")
    assert ran.returncode == 1 and not left and "gruyere post" not in ran.stderr, ran.stderr


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver", "torch"])
def test_children_that_end_well_leave_no_record_and_those_that_die_of_memory_a_copy(
    tmp_path, method
):
    for kind, exits, left_of in [("ends", "[0, 0]\n", 0), ("fails", "[1, 1]\n", 2)]:
        folder = tmp_path / kind
        folder.mkdir()
        ran, left = run(folder, CHILDREN, arguments=[method, kind])
        if method == "torch":
            # It ends the others when one fails.
            assert (ran.returncode == 0) == (kind == "ends"), ran.stderr
            assert bool(left) == (kind == "fails"), (left, ran.stderr)
        else:
            assert ran.stdout == exits and len(left) == left_of, (left, ran.stderr)
        if left:
            assert "out of memory" in post(folder), ran.stderr
