"""Runs tests of one of PyTorch's files in this process, in the order in which the file itself would
run them, and writes what becomes of each to a file as it goes.

    child.py FILE RESULTS [--wanted FILE] [--after N] [--gpu]

RESULTS gets a line of JSON when a test begins and one when it has ended, so that whoever started us
knows which test it was that ended the process. `--wanted` names a file of test names, one a line:
without, all tests of the file run. `--after N` leaves the first N of them out. `--gpu`: on a real
one, where values are compared.
"""

import argparse
import json
import os
import runpy
import sys
import time
import traceback
import unittest

import torch

# The stand-in has no cuDNN. After the next import torch lets nobody say so.
if "--gpu" not in sys.argv:
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_cudnn_sdp(False)

from torch.testing._internal import common_utils  # noqa: E402

import values  # noqa: E402


def cases(suite):
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from cases(test)
        else:
            yield test


def name(test):
    return f"{type(test).__name__}.{test._testMethodName}"


class Result(unittest.TestResult):
    """Writes each test's begin and end."""

    def __init__(self, file):
        super().__init__()
        self.file = file
        self.outcome = None

    def note(self, **facts):
        self.file.write(json.dumps(facts) + "\n")
        self.file.flush()

    def startTest(self, test):
        super().startTest(test)
        self.outcome = ("passed", "")
        self.began = time.monotonic()
        self.note(begun=name(test))

    def stopTest(self, test):
        super().stopTest(test)
        outcome, why = self.outcome
        took = round(time.monotonic() - self.began, 2)
        self.note(ended=name(test), outcome=outcome, why=why, took=took)

    def failed(self, error):
        self.outcome = ("failed", "".join(traceback.format_exception(*error))[-4000:])

    def addError(self, test, err):
        self.failed(err)

    def addFailure(self, test, err):
        self.failed(err)

    def addSubTest(self, test, subtest, err):
        if err is not None:
            self.failed(err)

    def addSkip(self, test, reason):
        self.outcome = ("skipped", reason)

    def addExpectedFailure(self, test, err):
        self.outcome = ("passed", "")

    def addUnexpectedSuccess(self, test):
        self.outcome = ("failed", "an unexpected success")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("file")
    parser.add_argument("results")
    parser.add_argument("--wanted")
    parser.add_argument("--after", type=int, default=0)
    parser.add_argument("--gpu", action="store_true")
    options = parser.parse_args()
    wanted = None
    if options.wanted:
        with open(options.wanted) as lines:
            wanted = {line.strip() for line in lines}

    def run_tests(argv=None):
        tests = unittest.TestLoader().loadTestsFromModule(sys.modules["__main__"])
        chosen = [test for test in cases(tests) if wanted is None or name(test) in wanted]
        with open(options.results, "a") as file:
            result = Result(file)
            unittest.TestSuite(chosen[options.after :])(result)
            result.note(done=len(chosen))
        # Whatever the tests have left (threads, queues) need not come to an end.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    if not options.gpu:
        values.leave_out()
    # The files call it when they are run as programs.
    common_utils.run_tests = run_tests
    sys.argv = [options.file]
    sys.path.insert(0, os.path.dirname(options.file))
    runpy.run_path(options.file, run_name="__main__")


main()
