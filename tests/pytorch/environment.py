"""What the PyTorch tests and measurements run in: environments, libraries, the stand-in GPU.
Each program of this folder imports it.
"""

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SKIPPED = 77
HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
VENV = ROOT / ".venv-torch"
PYTHON = VENV / "bin" / "python"
REQUIREMENTS = HERE / "requirements.txt"
LAYER = ROOT / ".venv-frameworks"
LAYER_REQUIREMENTS = HERE / "requirements-frameworks.txt"
# CUDA's headers, which the tests' own C++ is compiled against.
TOOLKIT = ["nvidia-cuda-runtime==13.5.37", "nvidia-cuda-crt==13.5.37"]
# Tests of what a newcomer does (README's lines, the tutorials, a comparison), of what torch's
# interface has since 2.12, and with Triton: they run where users are, in a plain installation
# (`plain --tests`).
PLAIN_TESTS = [
    "test_native_door_versions.py",
    "test_documented.py",
    "test_newcomer.py",
    "test_tutorials.py",
    "test_dryrun_triton.py",
]
PURELIB = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
PACKAGE = ROOT / "python_loader"
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")).resolve()


def skip(reason):
    print(f"the PyTorch tests were skipped: {reason}", flush=True)
    sys.exit(SKIPPED)


def pip_install(python, what, *words):
    """Installs it; where pip cannot, the tests are skipped, and the reason is pip's last error."""
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    done = subprocess.run([*pip, "--retries", "2", *words], stderr=subprocess.PIPE, text=True)
    sys.stderr.write(done.stderr)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        skip(f"pip could not install {what}: {errors[-1] if errors else 'see above'}")


def make_venv(venv, requirements, lines=""):
    """A virtual environment, complete: its stamp says what it was made of. `lines` are those of a
    .pth file: folders to see, and what to run when the interpreter starts."""
    stamp = venv / "complete"
    wanted = f"{sys.version}\n{requirements.read_text()}{lines}"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    print(f"making {venv} from {requirements.name}", flush=True)
    shutil.rmtree(venv, ignore_errors=True)
    if subprocess.run([sys.executable, "-m", "venv", venv]).returncode != 0:
        skip("python3 -m venv does not work here (Debian: apt install python3-venv)")
    pip_install(venv / "bin" / "python", requirements.name, "--no-deps", "-r", requirements)
    if lines:
        (venv / PURELIB / "layer.pth").write_text(lines)
    stamp.write_text(wanted)


def make_plain_venv(venv, requirement):
    """A virtual environment as a user makes it: what pip installs for this requirement, with all
    that it depends on. Returns its python."""
    python = venv / "bin" / "python"
    if (venv / "complete").exists():
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True)
    pip_install(python, f"{requirement} with what it depends on", requirement)
    (venv / "complete").touch()
    return python


def layer():
    """What the frameworks' environment sees besides its own: torch's, and our package as an
    installation would have left it."""
    return (
        f"{(VENV / PURELIB).resolve()}\n{PACKAGE}\n{(PACKAGE / 'gruyere_startup.pth').read_text()}"
    )


def build():
    packages = ["gruyere", "gruyere-cli", "gruyere-phantom-abi", "gruyere-torch-driver"]
    command = [
        "cargo",
        "build",
        "--release",
        "--locked",
        *[part for name in packages for part in ("-p", name)],
    ]
    # What reads where blocks come from (test_blame.py).
    reader = [*command[:4], "-p", "gruyere-record", "--example", "sites"]
    if any(subprocess.run(words, cwd=ROOT).returncode != 0 for words in (command, reader)):
        sys.exit("the build failed")


def fetch_toolkit(python=PYTHON):
    folder = TARGET / "cuda-toolkit"
    stamp = folder / "complete"
    if stamp.exists() and stamp.read_text() == str(TOOLKIT):
        return
    shutil.rmtree(folder, ignore_errors=True)
    # Headers alone are wanted: those of x86-64 are those of every machine.
    choice = ["--no-deps", "--only-binary=:all:", "--platform", "manylinux2014_x86_64"]
    pip_install(python, "CUDA's headers", *choice, "--target", folder, *TOOLKIT)
    stamp.write_text(str(TOOLKIT))


def link():
    folder = TARGET / "phantom-libs"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    # The names are the package's.
    _stand_in().link(TARGET / "release" / _stand_in().LIBRARY, folder)


def build_shim(python=PYTHON):
    """The native door's, before the tests: who builds one says so, and who waits for it too."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(PACKAGE),
        "LD_LIBRARY_PATH": str(TARGET / "phantom-libs"),
        "XDG_CACHE_HOME": str(TARGET / "shims"),
    }
    code = "import torch; from gruyere._native import shim; shim.build(torch)"
    if subprocess.run([python, "-c", code], env=environment).returncode != 0:
        sys.exit("the native door's shim could not be built")


def _stand_in():
    if str(PACKAGE) not in sys.path:
        sys.path.insert(0, str(PACKAGE))
    from gruyere import _stand_in

    return _stand_in


@functools.lru_cache(maxsize=None)
def owned():
    """The variable without which nobody runs on the phantom: this process holds the lock for what
    it starts, until it ends."""
    folder = tempfile.mkdtemp(prefix="gruyere-owner.")
    owner = _stand_in().Owner(Path(folder))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return owner.environment()


def at_once():
    """pytest-xdist's arguments: a process a core; the tests of a file in one process, since they
    share what it has made."""
    return ["-n", str(len(os.sched_getaffinity(0))), "--dist", "loadfile"]


def minor(version):
    """A version of torch without its patch, as numbers."""
    return tuple(map(int, version.split(".")[:2]))


def door_of(version):
    """The door that a version of torch is to get."""
    return "native" if minor(version) >= (2, 11) else "pluggable"


def prepare():
    """Makes everything that tests with torch need."""
    make_venv(VENV, REQUIREMENTS)
    prepare_for(PYTHON)


def prepare_for(python):
    """What tests need beside an environment with torch."""
    fetch_toolkit(python)
    build()
    link()
