"""The Python package, built as a wheel and installed into a clean virtual environment that sees
torch, and programs that run there."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from conftest import (
    LIBRARIES,
    LIBRARIES_PRELOADED,
    PHANTOM,
    ROOT,
    SHIM,
    TARGET,
    clean_environment,
    without_the_phantoms_line,
)

PACKAGE = ROOT / "python_loader"
WHEELS = TARGET / "wheels"
VENV = TARGET / "package-venv"

# How a program of the tests of the modes begins.
PRELUDE = """
import gc, json, os
import torch, gruyere
torch.backends.cudnn.enabled = False
MIB = 1 << 20
def tensor(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")
"""


def report(**expressions):
    """How it ends: with the values of these expressions, for Ended.report."""
    inside = ", ".join(f"{name}={expression}" for name, expression in expressions.items())
    return f"\nprint(json.dumps(dict({inside})))\n"


def build_wheel():
    """`pip wheel ./python_loader`, from nothing: the one wheel that it makes."""
    shutil.rmtree(WHEELS, ignore_errors=True)
    pip("wheel", "--no-deps", "--wheel-dir", WHEELS, PACKAGE)
    (wheel,) = WHEELS.iterdir()
    return wheel


def install(wheel):
    """Makes the virtual environment: the wheel, and torch by a line that names the folder where it
    is."""
    shutil.rmtree(VENV, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", VENV], check=True)
    pip("install", "--no-deps", "--no-index", wheel, python=VENV / "bin" / "python")
    (site,) = VENV.glob("lib/python*/site-packages")
    (site / "torch-is-there.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return VENV / "bin"


def pip(*arguments, python=sys.executable):
    command = [python, "-m", "pip", "--disable-pip-version-check", *arguments]
    # pip up to 25.2 applies the first to build environments, later ones the second.
    pinned = dict.fromkeys(
        ("PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT"),
        str(ROOT / "tests/pytorch/constraints-wheel.txt"),
    )
    environment = {**clean_environment(), **pinned, "CARGO_TARGET_DIR": str(TARGET)}
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout


@dataclass
class Ended:
    """A program that has ended."""

    code: int
    out: str
    err: str

    def check(self):
        assert self.code == 0, f"exit code {self.code}\n{self.out}\n{self.err}"
        return self

    @property
    def report(self):
        """The last line of its output, as JSON."""
        return json.loads(self.check().out.strip().splitlines()[-1])

    def warnings(self):
        return [line for line in self.err.splitlines() if "GruyereWarning" in line]


class Installed:
    """The environment with the package, on the phantom. Programs are written into, and run in, a
    folder of the test's own."""

    def __init__(self, binaries, wheel, folder):
        self.binaries = binaries
        self.wheel = wheel
        self.folder = folder

    def write(self, name, text):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def python(self, *arguments, **settings):
        """Runs python with `arguments`; settings are environment variables, and those that are None
        are taken away."""
        return self.command("python", *arguments, **settings)

    def command(self, name, *arguments, timeout=300, **settings):
        environment = clean_environment() | {
            "LD_PRELOAD": LIBRARIES_PRELOADED,
            "LD_LIBRARY_PATH": str(LIBRARIES),
            "GRUYERE_TEST_PHANTOM": str(PHANTOM),
            "PATH": os.pathsep.join([str(self.binaries), os.environ["PATH"]]),
            # The launchers' threads would make the two cores of a small machine slower, not faster.
            "OMP_NUM_THREADS": "1",
            **SHIM,
        }
        for key, value in settings.items():
            environment.pop(key, None)
            if value is not None:
                environment[key] = str(value)
        done = subprocess.run(
            [self.binaries / name, *map(str, arguments)],
            env=environment,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            timeout=timeout,
        )
        said = without_the_phantoms_line(done.stderr)
        if "GRUYERE_TEST_WITHOUT_SHIM" in os.environ:
            # With its line of the program, as Python's warnings have it.
            line = r"^.*the native door is not available: .*\n(  .*\n)?"
            said = re.sub(line, "", said, flags=re.M)
        return Ended(done.returncode, done.stdout, said)

    def code(self, code, *arguments, **settings):
        """Runs `code` as a script file."""
        return self.python(self.write("program.py", code), *arguments, **settings)
