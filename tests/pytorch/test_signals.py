"""A program that ends by a signal of its own choice, when all is done, leaves no record, and ends
by that signal as without Gruyère; one that a signal interrupts leaves its record."""

import os
import signal
import subprocess
import sys

import pytest

from conftest import COMMAND, clean_environment, launched_environment

# They sleep in a loop where they wait: a signal just before a pause() would be slept through.
HOLDS = """
import os, signal, sys, threading, time
import torch
kept = torch.ones(8 << 20, dtype=torch.uint8, device="cuda")
"""
INTERRUPTED = """
sys.excepthook = lambda *what: print("interrupted by", what[0].__name__, file=sys.stderr)
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""
# As uvicorn does.
SHUTS_DOWN = """
caught = []
before = signal.signal(signal.SIGTERM, lambda number, frame: caught.append(number))
print("ready", flush=True)
while not caught:
    time.sleep(0.05)
signal.signal(signal.SIGTERM, before)
print("has shut down", flush=True)
"""
RAISES = SHUTS_DOWN + "signal.raise_signal(caught[0])\n"
KILLS_ITSELF = SHUTS_DOWN + "os.kill(os.getpid(), caught[0])\n"
# The record of a process that goes on stays.
HANDLES = """
import pickle
assert pickle.loads(pickle.dumps((os.kill, signal.raise_signal))) == (os.kill, signal.raise_signal)
caught = []
signal.signal(signal.SIGTERM, lambda number, frame: caught.append(number))
signal.raise_signal(signal.SIGTERM)
os.kill(os.getpid(), signal.SIGTERM)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
signal.raise_signal(signal.SIGTERM)
signal.sigwait([signal.SIGTERM])
os.kill(os.getpid(), 0)
assert len(caught) == 2
os.kill(os.getpid(), signal.SIGKILL)
"""
WAITS = """
print("ready", flush=True)
signal.pause()
"""
RAN_OUT = """
try:
    torch.ones(2 << 30, dtype=torch.uint8, device="cuda")
finally:
    print("ready", flush=True)
"""


def run(folder, code, sent=None, launch=("-m", "gruyere")):
    """The exit code, what was printed, and the records left by a program that gets a signal."""
    records = folder / "records"
    records.mkdir(parents=True)
    (folder / "program.py").write_text(HOLDS + code)
    process = subprocess.Popen(
        [sys.executable, *launch, "program.py"],
        env=launched_environment(records, PHANTOM_MEMORY="1GiB"),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell starts what it runs in the background with Ctrl-C ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    out = ""
    if sent is not None:
        out = process.stdout.readline()
        os.kill(process.pid, sent)
    rest, err = process.communicate(timeout=120)
    return process.returncode, out + rest, err, list(records.glob("*.record"))


@pytest.mark.parametrize(
    "code, sent, says",
    [
        (INTERRUPTED, signal.SIGINT, "interrupted by KeyboardInterrupt"),
        (RAISES, signal.SIGTERM, "has shut down"),
        (KILLS_ITSELF, signal.SIGTERM, "has shut down"),
    ],
    ids=["Ctrl-C", "raise_signal", "kill"],
)
def test_a_stop_that_the_program_has_handled_is_a_clean_exit_by_the_same_signal(
    tmp_path, code, sent, says
):
    ended, out, err, left = run(tmp_path, code, sent)
    assert ended == -sent and says in out + err and not left, (ended, out, err, left)
    plain, plain_out, plain_err, _ = run(tmp_path / "plain", code, sent, launch=())
    assert (plain, plain_out) == (ended, out), plain_err


@pytest.mark.parametrize("code, sent", [(HANDLES, None), (WAITS, signal.SIGTERM)])
def test_a_process_that_goes_on_after_a_signal_and_one_that_a_signal_interrupts_have_records(
    tmp_path, code, sent
):
    ended, _, err, left = run(tmp_path, code, sent)
    assert ended == -(sent or signal.SIGKILL) and len(left) == 1, (ended, err)
    words = [COMMAND, "post", "--directory", tmp_path / "records"]
    ran = subprocess.run(words, env=clean_environment(), capture_output=True, text=True)
    said = " ".join(ran.stdout.split())
    assert "by a signal that it did not handle (SIGTERM or SIGKILL, " in said, ran.stdout


def test_a_program_that_ran_out_of_memory_leaves_its_copy_and_is_no_clean_exit(tmp_path):
    ended, _, err, left = run(tmp_path, RAN_OUT)
    assert ended == 1 and len(left) == 1 and "gruyere post" in err, (ended, err)
