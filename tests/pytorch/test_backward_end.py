"""The end of a program whose backward has failed (gruyere._torch.backward_end). torch keeps a
Python object with a backward from 2.15 on, so a thread with the name of torch's stands for it
here."""

import json
import os
import subprocess
import sys

from conftest import ROOT

# A thread that is called as torch's are and computes without the interpreter's lock, then needs the
# lock, as one that lets go of a backward does; then the program ends.
PROGRAM = """
import ctypes, hashlib, json, sys, threading, time
from gruyere._torch import backward_end

named, done = threading.Event(), []

def backward(rounds, library=ctypes.CDLL(None)):
    library.prctl(15, b"pt_autograd_0", 0, 0, 0)
    named.set()
    hashlib.pbkdf2_hmac("sha256", b"", b"", rounds)
    done.append(True)
    threading.Event().wait()

threading.Thread(target=backward, args=[int(sys.argv[1])], daemon=True).start()
named.wait()
start = time.monotonic()
asleep = backward_end.wait(float(sys.argv[2]))
print(json.dumps([asleep, bool(done), time.monotonic() - start]))
"""


def ended(rounds, patience):
    """Whether the thread sleeps, whether it has done its work, and how long the wait took."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(rounds), str(patience)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "python_loader")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_the_end_waits_for_a_thread_of_a_failed_backward():
    asleep, done, _ = ended(300_000, 30)
    assert asleep and done


def test_the_end_waits_for_a_thread_that_goes_on_no_longer_than_it_says():
    asleep, done, seconds = ended(1_000_000_000, 0.1)
    assert not asleep and not done and 0.1 <= seconds < 30


def test_without_threads_of_a_backward_the_end_does_not_wait():
    sys.path.insert(0, str(ROOT / "python_loader"))
    try:
        from gruyere._torch import backward_end
    finally:
        sys.path.pop(0)
    assert backward_end.wait(0)
