"""Fixtures: run a program of programs/ on the phantom, in a process of its own."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from filelock import FileLock

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TARGET = Path(os.environ.get("GRUYERE_TEST_BUILD", ROOT / "target"))
RELEASE = TARGET / "release"
GRUYERE = RELEASE / "libgruyere.so"
PHANTOM = RELEASE / "libphantom_cuda.so"
COMMAND = RELEASE / "gruyere"

sys.path.insert(0, str(ROOT / "python_loader"))

from gruyere import _stand_in  # noqa: E402

# Other stand-ins than the phantom under its usual names: `matrix` has torch versions that ask for
# other libraries.
LIBRARIES = Path(os.environ.get("GRUYERE_TEST_LIBRARIES", TARGET / "phantom-libs"))
# Where the native door's shim is kept, which `run` builds before the tests begin; no toolkit is
# named, nor found.
SHIM = {"XDG_CACHE_HOME": str(TARGET / "shims")}
LIBRARIES_PRELOADED = os.environ.get("GRUYERE_TEST_PRELOAD", str(PHANTOM))

# Where the programs' records are: they go with the session, and the user's own `gruyere ps` does
# not show them. `cargo xtask test` says where, so that it sees what is left.
MEMORY = os.environ.get("GRUYERE_TEST_MEMORY", "/dev/shm")
MEMORY = MEMORY if os.access(MEMORY, os.W_OK) else None
RECORDS = tempfile.mkdtemp(prefix="gruyere-test-records.", dir=MEMORY)
os.environ["GRUYERE_RECORD_DIR"] = RECORDS
# The lock without which nobody runs on the phantom: this process's, for what it starts.
OWNERS = tempfile.mkdtemp(prefix="gruyere-test-owner.")
OWNER = _stand_in.Owner(Path(OWNERS))


def pytest_configure(config):
    config.addinivalue_line("markers", "thorough: takes long; run by `run --thorough` or by name")


# Not atexit: a worker of pytest-xdist's ends without.
def pytest_unconfigure():
    for folder in (RECORDS, OWNERS):
        shutil.rmtree(folder, ignore_errors=True)


# What one test, its fixtures or their end may take, each; GRUYERE_TEST_PATIENCE is a factor for
# slow machines, as in crates/xtask/src/deadline.rs. A test that hangs fails by name, and the
# program that it waits for is ended (subprocess.run does that where it is interrupted).
LIMIT = 900 * float(os.environ.get("GRUYERE_TEST_PATIENCE", "1"))


@contextmanager
def limited(what):
    def late(*_):
        pytest.fail(f"{what} took longer than {LIMIT:.1f} s, its deadline, and was ended")

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, LIMIT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    with limited(f"what {item.name} needs"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    with limited(item.name):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item):
    with limited(f"the end of {item.name}"):
        return (yield)


# What the phantom's process needs, and what none of its children may inherit by accident.
PRELOAD = ("LD_PRELOAD", "LD_LIBRARY_PATH")


def clean_environment():
    """The environment without any setting of ours, but for what says that we own the phantom."""
    drop = re.compile(r"^(PHANTOM_|GRUYERE_|PYTORCH_|LD_PRELOAD$|LD_LIBRARY_PATH$)")
    kept = {key: value for key, value in os.environ.items() if not drop.match(key)}
    return kept | {"GRUYERE_RECORD_DIR": RECORDS} | OWNER.environment()


def launched_environment(records, **settings):
    """That of `python -m gruyere PROGRAM` on the phantom, which keeps its record in `records`."""
    return (
        clean_environment()
        | {
            "LD_PRELOAD": LIBRARIES_PRELOADED,
            "LD_LIBRARY_PATH": str(LIBRARIES),
            "PYTHONPATH": str(ROOT / "python_loader"),
            "GRUYERE_LIBRARY": str(GRUYERE),
            "GRUYERE_RECORD_DIR": str(records),
        }
        | SHIM
        | settings
    )


def without_the_phantoms_line(said):
    """What a process said, without that it has no GPU (test_stand_in_owner.py): a line of the
    phantom's, and a warning of the package's, with the program's line where that is known."""
    said = re.sub(r"^gruyere: stand-in GPU \(PID \d+\): .*\n", "", said, flags=re.MULTILINE)
    warning = r"^.*GruyereWarning: this process runs on the stand-in GPU.*\n(  .*\n)?"
    return re.sub(warning, "", said, flags=re.MULTILINE)


# torch 2.15 may abort where a program ends close behind a backward (docs/pytorch.md). Who enables
# Gruyère waits at the exit; a program without it does the same. On the code's first line, so that
# its own lines keep their numbers.
WAITING = (
    "import atexit, sys; sys.path.append({folder!r}); import backward_end; sys.path.pop(); "
    "atexit.register(backward_end.wait); "
).format(folder=str(ROOT / "python_loader" / "gruyere" / "_torch"))


@dataclass
class Ran:
    """A program that has ended."""

    code: int
    out: str
    err: str
    pid: int
    books: dict = field(default_factory=dict)
    report: dict = field(default_factory=dict)

    def check(self):
        """It ended well, and broke none of the driver's rules."""
        if self.code < 0:
            pytest.fail(f"killed by {signal.Signals(-self.code).name}\n{self.out}\n{self.err}")
        assert self.code == 0, f"exit code {self.code}\n{self.out}\n{self.err}"
        assert self.books, f"no books were written\n{self.err}"
        assert self.books["misuse"] == []
        assert self.books["stale_registrations"] == []
        assert "not simulated" not in self.err, self.err
        return self


class Phantom:
    def __init__(self, folder):
        self.folder = folder
        self.runs = 0

    def run(self, program, *arguments, allocator="native", code=None, timeout=300, **settings):
        """Runs programs/PROGRAM.py (or `code`) under the phantom. Settings are environment
        variables."""
        self.runs += 1
        books = self.folder / f"books-{self.runs}.json"
        environment = clean_environment() | {
            "LD_PRELOAD": LIBRARIES_PRELOADED,
            "LD_LIBRARY_PATH": str(LIBRARIES),
            "PHANTOM_BOOKS": str(books),
            "GRUYERE_TEST_ALLOCATOR": allocator,
            "GRUYERE_TEST_LIBRARY": str(GRUYERE),
            "GRUYERE_TEST_PHANTOM": str(PHANTOM),
            "GRUYERE_TEST_COMMAND": str(COMMAND),
            **SHIM,
        }
        if allocator == "expandable":
            # Up to torch 2.8 the variable was CUDA's.
            environment["PYTORCH_ALLOC_CONF"] = environment["PYTORCH_CUDA_ALLOC_CONF"] = (
                "expandable_segments:True"
            )
        environment |= {key: str(value) for key, value in settings.items()}
        what = ["-c", WAITING + code] if code else [HERE / "programs" / f"{program}.py"]
        process = subprocess.Popen(
            [sys.executable, *what, *map(str, arguments)],
            env=environment,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            pytest.fail(f"{program} took more than {timeout} s\n{out}\n{err}")
        ran = Ran(process.returncode, out, without_the_phantoms_line(err), process.pid)
        if books.exists():
            ran.books = json.loads(books.read_text())
        last = out.strip().splitlines()[-1:] or [""]
        if last[0].startswith("{"):
            ran.report = json.loads(last[0])
        return ran


@pytest.fixture
def phantom(tmp_path):
    return Phantom(tmp_path)


# The two ways in: torch's bare constructor, and all hooks wired (with a witness between torch and
# the library).
@pytest.fixture(params=["bare", "hooked"])
def gruyere(request):
    return request.param


# The Python package as users get it: a wheel, installed into a clean environment. Built once a run,
# when a test asks for it: by the worker that asks first.
@pytest.fixture(scope="session")
def wheel_installed(tmp_path_factory, worker_id):
    import package

    folder = tmp_path_factory.getbasetemp()
    # The workers' folders lie in one of the run's.
    done = (folder if worker_id == "master" else folder.parent) / "wheel"
    with FileLock(done.with_suffix(".lock")):
        if not done.exists():
            wheel = package.build_wheel()
            package.install(wheel)
            done.write_text(str(wheel))
    return package.VENV / "bin", Path(done.read_text())


@pytest.fixture
def installed(wheel_installed, tmp_path):
    import package

    return package.Installed(*wheel_installed, tmp_path)
