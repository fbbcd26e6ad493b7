"""Nobody takes the stand-in GPU for a real one by mistake: it runs while the process that started
it lives, says what it is, and keeps off machines that have a real GPU. No torch is needed."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from conftest import PHANTOM, ROOT, clean_environment
from gruyere import _stand_in

REFUSED = 78
# What the stand-in has of CUDA in few words: the name of device 0.
NAME = f"""
import ctypes, sys
driver = ctypes.CDLL({str(PHANTOM)!r})
name = ctypes.create_string_buffer(256)
assert driver.cuInit(0) == 0 and driver.cuDeviceGetName(name, 256, 0) == 0
print(name.value.decode(), flush=True)
"""
# The owner of a file in the folder of its first argument.
OWNER = f"""
import os, sys
sys.path.insert(0, {str(ROOT / "python_loader")!r})
from pathlib import Path
from gruyere import _stand_in
owner = _stand_in.Owner(Path(sys.argv[1]))
"""
RETAIN = """
device, context = ctypes.c_int(), ctypes.c_void_p()
assert driver.cuDeviceGet(ctypes.byref(device), 0) == 0
assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
"""


def python(code, *words, before=(), **variables):
    """Runs `code` in an environment that says nothing of the stand-in but what `variables` do."""
    environment = {
        key: value for key, value in clean_environment().items() if key != _stand_in.OWNER
    }
    environment |= {key: str(value) for key, value in variables.items()}
    return subprocess.run(
        [*before, sys.executable, "-c", textwrap.dedent(code), *map(str, words)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def refused(ran):
    """The one line with which a process was ended."""
    assert (ran.returncode, ran.stdout) == (REFUSED, ""), ran
    (line,) = ran.stderr.splitlines()
    assert re.match(r"gruyere: PID \d+ is ended: it would run on the stand-in GPU", line), line
    assert "unset LD_PRELOAD LD_LIBRARY_PATH" in line
    return line


@pytest.fixture
def owner(tmp_path):
    with _stand_in.Owner(tmp_path) as owner:
        yield owner


def test_a_device_is_called_a_stand_in_and_one_line_on_stderr_says_it(owner):
    ran = python(NAME + RETAIN + "driver.cuInit(0)", **owner.environment())
    assert ran.stdout == "Phantom H100 (stand-in)\n"
    (line,) = ran.stderr.splitlines()
    assert re.match(r"gruyere: stand-in GPU \(PID \d+\): .* computes nothing$", line)
    ran = python(NAME, PHANTOM_NAME="NVIDIA A100", **owner.environment())
    assert ran.stdout == "NVIDIA A100 (stand-in)\n"


def test_a_dry_run_shows_the_program_the_gpu_that_was_asked_for_and_speaks_itself(owner):
    ran = python(NAME, PHANTOM_DRYRUN="1", PHANTOM_NAME="NVIDIA A100", **owner.environment())
    assert (ran.stdout, ran.stderr) == ("NVIDIA A100\n", "")


def test_the_library_alone_is_silent(tmp_path):
    ran = python("print('well')", LD_PRELOAD=PHANTOM, PHANTOM_OWNER=tmp_path / "gone")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "well\n", "")


def test_an_environment_that_was_left_is_refused_with_what_to_unset(tmp_path):
    preload = f"{PHANTOM}"
    line = refused(python(NAME, LD_PRELOAD=preload))
    assert "PHANTOM_OWNER is not set" in line and f"LD_PRELOAD={preload}" in line
    gone = tmp_path / "gone"
    line = refused(python(NAME, PHANTOM_OWNER=gone, LD_LIBRARY_PATH="/left/there"))
    assert f"PHANTOM_OWNER={gone}: No such file" in line and "LD_LIBRARY_PATH=/left/there" in line
    # A file that nobody locks, whoever it names.
    (tmp_path / "left").write_text(f"{os.getpid()} 1\n")
    assert "nobody locks" in refused(python(NAME, PHANTOM_OWNER=tmp_path / "left"))
    # In a dry run too, and where CUDA is first used by its runtime.
    refused(python(NAME, PHANTOM_DRYRUN="1", PHANTOM_OWNER=gone))
    runtime = f"import ctypes; ctypes.CDLL({str(PHANTOM)!r}).cudaFree(None)"
    refused(python(runtime, PHANTOM_OWNER=gone))


# By name: what a process does while its owner lives, and what once that was killed.
OUTLIVING = {
    "first used late": ("import ctypes, sys", NAME + RETAIN),
    "no context yet": (NAME, RETAIN),
    "has a context": (NAME + RETAIN, "assert driver.cuCtxSetCurrent(context) == 0"),
}


def test_a_process_that_asks_nvml_alone_is_refused_too():
    refused(python(f"import ctypes; ctypes.CDLL({str(PHANTOM)!r}).nvmlInit_v2()"))


def test_a_process_that_outlives_its_owner_is_refused(tmp_path):
    """In a session of its own, its owner killed. One that has its context works on: it is not found
    out (crates/phantom/abi/src/owner.rs)."""
    readable, writable = os.pipe()
    programs = [
        f"{before}\nprint('begun', flush=True)\nsys.stdin.read()\n{after}\n"
        f"open({str(tmp_path / what)!r}, 'w').close()"
        for what, (before, after) in OUTLIVING.items()
    ]
    code = f"""
import subprocess
for number, program in enumerate({programs!r}):
    child = subprocess.Popen(
        [sys.executable, "-c", program], env=os.environ | owner.environment(),
        start_new_session=True, stdin={readable}, stdout=subprocess.PIPE,
        stderr=open(f"{{sys.argv[1]}}/{{number}}", "w"),
    )
    while child.stdout.readline() != b"begun\\n":
        pass
    print(child.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER + code, tmp_path],
        env=clean_environment(),
        stdout=subprocess.PIPE,
        pass_fds=[readable],
        text=True,
    )
    out, _ = owner.communicate(timeout=60)
    os.close(readable)
    assert owner.returncode == -signal.SIGKILL
    children = [int(line) for line in out.splitlines()]
    # The owner is dead; now they go on.
    os.close(writable)
    deadline = time.monotonic() + 30
    while any(is_running(child) for child in children) and time.monotonic() < deadline:
        time.sleep(0.01)
    said = [(tmp_path / str(number)).read_text() for number in range(len(OUTLIVING))]
    assert ["nobody locks" in one for one in said] == [True, True, False], said
    assert [(tmp_path / what).exists() for what in OUTLIVING] == [False, False, True]


def is_running(child):
    try:
        with open(f"/proc/{child}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_forked_child_of_the_owner_does_not_keep_the_lock(tmp_path):
    code = """
child = os.fork()
if child == 0:
    os.setsid()
    os.close(1), os.close(2)
    import time
    time.sleep(60)
    os._exit(0)
print(owner.file, child, flush=True)
os._exit(0)
"""
    file, child = python(OWNER + code, tmp_path).stdout.split()
    try:
        assert is_running(child)
        refused(python(NAME, PHANTOM_OWNER=file))
    finally:
        os.kill(int(child), signal.SIGKILL)


def test_the_owner_itself_runs_and_keeps_its_lock(tmp_path):
    """The stand-in looks at the file in the process that holds the lock, and must not lose it."""
    code = OWNER + f"os.environ.update(owner.environment())\n{NAME}\nimport subprocess\n" + f"""
sys.exit(subprocess.run([sys.executable, "-c", {NAME!r}]).returncode)
"""
    ran = python(code, tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == 2 * "Phantom H100 (stand-in)\n"


@pytest.mark.parametrize("namespaces", ["-Ur", "-Urpf"], ids=["user", "user and pid"])
def test_an_owned_process_runs_in_other_namespaces(owner, namespaces):
    if subprocess.run(["unshare", namespaces, "true"], capture_output=True).returncode != 0:
        pytest.skip(f"unshare {namespaces} is not permitted here")
    ran = python(NAME, before=["unshare", namespaces], **owner.environment())
    assert ran.stdout == "Phantom H100 (stand-in)\n", ran.stderr
    owner.close()
    refused(python(NAME, before=["unshare", namespaces], **owner.environment()))


def test_beside_a_real_driver_only_a_dry_run_runs(owner, tmp_path, monkeypatch):
    dev = tmp_path / "dev"
    dev.mkdir()
    settings = owner.environment() | {_stand_in.DEV_FOLDER: dev}
    monkeypatch.setenv(_stand_in.DEV_FOLDER, str(dev))
    for name in _stand_in.DEVICE_FILES:
        assert _stand_in.real_driver() is None
        assert python(NAME, **settings).returncode == 0
        (dev / name).touch()
        line = refused(python(NAME, **settings))
        assert f"{dev / name}" in line and "`gruyere dryrun`" in line
        assert python(NAME, PHANTOM_DRYRUN="1", **settings).returncode == 0
        assert _stand_in.real_driver() == dev / name
        (dev / name).unlink()


def test_a_file_belongs_to_one_owner(owner, tmp_path):
    with pytest.raises(FileExistsError):
        _stand_in.Owner(tmp_path)
    owner.close()
    with _stand_in.Owner(tmp_path) as next_one:
        assert python(NAME, **next_one.environment()).returncode == 0


def by_hand(*words, **variables):
    environment = clean_environment() | {
        "PYTHONPATH": str(ROOT / "python_loader"),
        "GRUYERE_PHANTOM": str(PHANTOM),
    }
    del environment[_stand_in.OWNER]
    return subprocess.Popen(
        [sys.executable, "-m", "gruyere._stand_in", *words],
        env=environment | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_command_runs_on_the_stand_in_by_hand(tmp_path):
    command = by_hand(sys.executable, "-c", NAME + "sys.exit(7)", TMPDIR=str(tmp_path))
    out, err = command.communicate(timeout=60)
    assert (command.returncode, out) == (7, "Phantom H100 (stand-in)\n"), err
    assert list(tmp_path.iterdir()) == [], "nothing is left"
    for words, code, said in [((), 2, "usage: "), (("/nowhere/x",), 127, "/nowhere/x: No such")]:
        command = by_hand(*words)
        _, err = command.communicate(timeout=60)
        assert command.returncode == code and said in err, err


def test_by_hand_too_a_kernels_results_read_as_zeros_unless_asked_otherwise():
    code = "import os; print(os.environ.get('PHANTOM_VALUES'))"
    for variables, values in [
        ({}, "zeros"),
        ({"PHANTOM_VALUES": "random:1"}, "random:1"),
        ({"PHANTOM_CONTENTS": "handles"}, "None"),
    ]:
        out, err = by_hand(sys.executable, "-c", code, **variables).communicate(timeout=60)
        assert out == f"{values}\n", err


def test_a_signal_to_end_reaches_the_command_and_its_exit_code_comes_back():
    code = "import signal, time; print('begun', flush=True); signal.pause()"
    command = by_hand(sys.executable, "-c", code)
    assert command.stdout.readline() == "begun\n"
    command.send_signal(signal.SIGTERM)
    command.communicate(timeout=60)
    assert command.returncode == 128 + signal.SIGTERM


def test_a_program_can_ask_whether_its_cuda_is_the_stand_in(owner):
    code = f"""
    import ctypes, sys
    sys.path.insert(0, {str(ROOT / "python_loader")!r})
    from gruyere import _stand_in
    print(_stand_in.is_device())
    """
    assert python(code).stdout == "False\n"
    assert python(code, LD_PRELOAD=PHANTOM).stdout == "True\n"
    assert ctypes.CDLL(None) and not _stand_in.is_device()
