"""The native door's shim on the user's machine: what it is built from, where it is kept, and what
happens where it cannot be had.

Most of it needs neither torch nor a real compiler: a torch that is a folder of headers, and a
compiler that writes down that it was called."""

import errno
import importlib
import os
import subprocess
import sys
import time
import types
from multiprocessing import get_context
from pathlib import Path

import pytest

from conftest import LIBRARIES, LIBRARIES_PRELOADED, ROOT, clean_environment
from door import PRELUDE, settings

COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo "a compiler, version ${FAKE_VERSION:-1}"; exit; fi
echo "$@" >> "$FAKE_LOG"
sleep ${FAKE_SECONDS:-0}
if [ -n "$FAKE_ERROR" ]; then echo "shim.cpp:1: error: $FAKE_ERROR"; eval "$FAKE_END"; exit 1; fi
while [ "$1" != -o ]; do shift; done
echo built > "$2"
"""


@pytest.fixture
def shim(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "python_loader"))
    return importlib.import_module("gruyere._shim")


class Machine:
    """A torch, a compiler, a home."""

    def __init__(self, folder, monkeypatch):
        self.folder = folder
        self.monkeypatch = monkeypatch
        self.log = folder / "calls"
        compiler = folder / "compiler"
        compiler.write_text(COMPILER)
        compiler.chmod(0o755)
        for name, value in {
            "CXX": compiler,
            "XDG_CACHE_HOME": folder / "cache",
            "FAKE_LOG": self.log,
        }.items():
            monkeypatch.setenv(name, str(value))
        headers = (
            "core/Allocator",
            "core/CachingDeviceAllocator",
            "core/Stream",
            "core/impl/GPUTrace",
            "util/Exception",
        )
        headers += (
            "cuda/CUDAAllocatorConfig",
            "cuda/CUDACachingAllocator",
            "cuda/CUDAStream",
            "macros/Macros",
        )
        for name in headers:
            header = folder / "torch" / "include" / "c10" / f"{name}.h"
            header.parent.mkdir(parents=True, exist_ok=True)
            header.write_text(f"// {name}")

    def torch(self, version="2.11.0", git="70d9", cuda="13.0", abi=True):
        told = types.SimpleNamespace(git_version=git, cuda=cuda)
        inside = types.SimpleNamespace(_GLIBCXX_USE_CXX11_ABI=abi)
        return types.SimpleNamespace(
            __version__=version,
            __file__=str(self.folder / "torch" / "__init__.py"),
            version=told,
            _C=inside,
        )

    def set(self, name, value):
        self.monkeypatch.setenv(name, str(value))

    def calls(self):
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def machine(tmp_path, monkeypatch):
    return Machine(tmp_path, monkeypatch)


def test_it_is_built_once_into_a_folder_of_the_users_own_and_links_torchs_two_libraries_alone(
    shim, machine
):
    file = shim.build(machine.torch())
    assert shim.build(machine.torch()) == file and len(machine.calls()) == 1
    assert file.parent == machine.folder / "cache" / "gruyere" / "shims"
    assert file.parent.stat().st_mode & 0o777 == 0o700 and file.stat().st_mode & 0o777 == 0o600
    (call,) = machine.calls()
    words = call.split()
    assert [word for word in words if word.startswith("-l")] == ["-lc10_cuda", "-lc10"]
    assert (
        "-D_GLIBCXX_USE_CXX11_ABI=1" in words and "rpath" not in call and "-Wl,-z,nodelete" in words
    )
    assert shim.build(machine.torch(), anew=True) == file and len(machine.calls()) == 2
    assert {path.name for path in file.parent.iterdir()} == {file.name, "lock"}


def test_whatever_it_depends_on_gives_another_file(shim, machine):
    first = shim.build(machine.torch())
    others = [{"version": "2.11.1"}, {"git": "70da"}, {"cuda": "12.8"}, {"abi": False}]
    files = [first, *(shim.build(machine.torch(**other)) for other in others)]
    machine.set("FAKE_VERSION", 2)
    files.append(shim.build(machine.torch()))
    header = machine.folder / "torch" / "include" / "c10" / "cuda" / "CUDACachingAllocator.h"
    before = header.read_text()
    header.write_text(before + " one virtual function more")
    files.append(shim.build(machine.torch()))
    header.write_text(before)
    source = machine.folder / "shim.cpp"
    source.write_text("another source")
    machine.monkeypatch.setattr(shim, "sources", lambda: [source])
    files.append(shim.build(machine.torch()))
    assert len(set(files)) == len(files) == len(machine.calls()) == 8
    assert "-D_GLIBCXX_USE_CXX11_ABI=0" in machine.calls()[4]


def _build(machine_torch_folder, at):
    from gruyere import _shim

    told = types.SimpleNamespace(git_version="70d9", cuda="13.0")
    torch = types.SimpleNamespace(__version__="2.11.0", __file__=machine_torch_folder, version=told)
    torch._C = types.SimpleNamespace(_GLIBCXX_USE_CXX11_ABI=True)
    return str(_shim.build(torch))


def test_of_many_ranks_at_once_one_builds(shim, machine):
    machine.set("FAKE_SECONDS", 0.3)
    with get_context("fork").Pool(8) as ranks:
        files = ranks.starmap(_build, [(machine.torch().__file__, at) for at in range(8)])
    assert len(set(files)) == 1 and len(machine.calls()) == 1


def test_without_locks_each_puts_a_whole_file_in_place(shim, machine):
    import fcntl

    def no_locks(*_):
        raise OSError("this file system has none")

    machine.monkeypatch.setattr(fcntl, "flock", no_locks)
    machine.set("FAKE_SECONDS", 0.3)
    with get_context("fork").Pool(4) as ranks:
        files = ranks.starmap(_build, [(machine.torch().__file__, at) for at in range(4)])
    assert len(set(files)) == 1 and Path(files[0]).read_text() == "built\n"
    assert {path.name for path in Path(files[0]).parent.iterdir()} == {Path(files[0]).name, "lock"}


# Takes the lock that those who build take, says so, and stops.
STOPS = """
import fcntl, os, signal, sys
lock = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
fcntl.flock(lock, fcntl.LOCK_EX)
print("holds", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.fixture
def stopped():
    """Makes a process that is stopped while it holds the lock of a folder."""
    holders = []

    def stop(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        words = [sys.executable, "-c", STOPS, folder / "lock"]
        holders.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
        assert holders[-1].stdout.readline() == "holds\n"
        return holders[-1]

    yield stop
    for holder in holders:
        holder.kill()
        holder.wait()
        holder.stdout.close()


def test_a_stopped_process_that_builds_is_waited_for_only_so_long(shim, machine, stopped):
    folder = shim.cache()
    holder = stopped(folder)
    machine.monkeypatch.setattr(shim, "_TURN_SECONDS", 0.3)
    start = time.monotonic()
    with pytest.raises(shim.Unavailable, match=f"process {holder.pid} has been building"):
        shim.build(machine.torch())
    assert 0.3 <= time.monotonic() - start < 5 and machine.calls() == []
    holder.kill()
    holder.wait()
    built = shim.build(machine.torch())
    assert built.read_text() == "built\n"
    # What is built already nobody has to wait for.
    stopped(folder)
    machine.monkeypatch.setattr(shim, "_TURN_SECONDS", 60)
    assert shim.build(machine.torch()) == built


def test_a_stopped_process_that_builds_leaves_the_pluggable_door(phantom, tmp_path, stopped):
    holder = stopped(tmp_path / "gruyere" / "shims")
    code = PRELUDE.replace("gpu.install()", """
from gruyere import _shim
_shim._TURN_SECONDS = 0.3
gruyere.enable()""") + """
assert tensor(4).numel() == 4 * MIB and torch.cuda.get_allocator_backend() == "pluggable"
"""
    ran = phantom.run("", code=code, allocator="door", **settings(XDG_CACHE_HOME=tmp_path))
    assert ran.code == 0, ran.err
    (line,) = [line for line in ran.err.splitlines() if "GruyereWarning" in line]
    assert f"process {holder.pid} has been building" in line, line
    assert "The pluggable door serves" in line, line


def test_without_a_compiler_what_another_node_has_built_serves(shim, machine):
    built = shim.build(machine.torch())
    machine.set("CXX", "/nowhere/c++")
    assert shim.build(machine.torch()) == built
    with pytest.raises(shim.Unavailable, match="no C\\+\\+ compiler"):
        shim.build(machine.torch(git="another"))


def test_a_failed_build_is_remembered_until_it_is_asked_for(shim, machine):
    machine.set("FAKE_ERROR", "cannot allocate an object of abstract type")
    for _ in range(3):
        with pytest.raises(shim.Unavailable, match="abstract type"):
            shim.build(machine.torch())
    assert len(machine.calls()) == 1
    machine.set("FAKE_ERROR", "")
    assert shim.build(machine.torch(), anew=True).read_text() == "built\n"
    assert shim.build(machine.torch()).exists() and len(machine.calls()) == 2


@pytest.mark.parametrize(
    "passing",
    [
        "error writing to /tmp/a.s: No space left on device",
        "Killed signal terminated program cc1plus",
    ],
)
def test_a_failure_that_is_the_machines_is_not_remembered(shim, machine, passing):
    machine.set("FAKE_ERROR", passing)
    for tries in (1, 2):
        with pytest.raises(shim.Unavailable, match="do not make a shim"):
            shim.build(machine.torch())
        assert len(machine.calls()) == tries
    machine.set("FAKE_ERROR", "killed")
    machine.set("FAKE_END", "kill -9 $$")
    with pytest.raises(shim.Unavailable):
        shim.build(machine.torch())
    machine.set("FAKE_END", "")
    machine.set("FAKE_ERROR", "")
    machine.set("FAKE_SECONDS", 5)
    machine.monkeypatch.setattr(shim, "_PATIENCE_SECONDS", 0.1)
    with pytest.raises(shim.Unavailable, match="did not end"):
        shim.build(machine.torch())
    machine.set("FAKE_SECONDS", 0)
    machine.monkeypatch.setattr(shim, "_PATIENCE_SECONDS", 60)
    assert shim.build(machine.torch()).exists()


def test_a_failure_without_cudas_headers_says_nothing_of_a_build_with_them(shim, machine):
    folders = []
    machine.monkeypatch.setattr(shim, "cuda_folders", lambda: folders)
    machine.set("FAKE_ERROR", "cuda_runtime_api.h: No such file or directory")
    with pytest.raises(shim.Unavailable, match="No such file"):
        shim.build(machine.torch())
    machine.set("FAKE_ERROR", "")
    folders.append(machine.folder)
    assert shim.build(machine.torch()).exists()


def test_whatever_the_machine_refuses_is_a_reason_and_no_error(shim, machine):
    """As on a mount that can only be read, on a full disk, with a name that nobody can split, and
    with files that go meanwhile."""

    def refusing(code):
        def refuse(*_, **__):
            raise OSError(code, os.strerror(code))
        return refuse

    real = shim.build(machine.torch())
    for name in ("unlink", "write_text"):
        with machine.monkeypatch.context() as patch:
            patch.setattr(Path, name, refusing(errno.EROFS))
            patch.setattr(os, "unlink", refusing(errno.EROFS))
            patch.setattr(shim.tempfile, "mkstemp", refusing(errno.EROFS))
            assert shim.build(machine.torch()) == real
            with pytest.raises(shim.Unavailable, match="Read-only file system"):
                shim.build(machine.torch(git="another"))
    # No room to remember a failure in: it is the failure that is told, and nothing half is left.
    machine.set("FAKE_ERROR", "abstract type")
    with machine.monkeypatch.context() as patch:
        patch.setattr(os, "fdopen", refusing(errno.ENOSPC))
        with pytest.raises(shim.Unavailable, match="abstract type"):
            shim.build(machine.torch(git="another"))
    assert {path.name for path in real.parent.iterdir()} == {real.name, "lock"}
    machine.set("FAKE_ERROR", "")
    with machine.monkeypatch.context() as patch:
        patch.setattr(Path, "lstat", refusing(errno.ENOENT))
        with pytest.raises(shim.Unavailable):
            shim.install(machine.torch())
    machine.set("CXX", 'g++ "')
    with pytest.raises(shim.Unavailable, match="CXX"):
        shim.install(machine.torch())
    machine.set("CXX", "/nowhere/c++")
    with machine.monkeypatch.context() as patch:
        patch.setattr(Path, "glob", refusing(errno.EIO))
        with pytest.raises(shim.Unavailable):
            shim.build(machine.torch())


def test_the_folder_above_is_the_users_own_too_and_there_must_be_a_home(shim, machine):
    above = machine.folder / "open" / "gruyere"
    above.mkdir(parents=True)
    above.chmod(0o777)
    machine.set("XDG_CACHE_HOME", above.parent)
    shim.build(machine.torch())
    assert above.stat().st_mode & 0o022 == 0
    if os.geteuid() == 0:
        os.chown(above, 12345, 12345)
        with pytest.raises(shim.Unavailable, match="this user's alone"):
            shim.build(machine.torch())
    above.rename(above.with_name("elsewhere"))
    above.symlink_to(above.with_name("elsewhere"))
    with pytest.raises(shim.Unavailable, match="this user's alone"):
        shim.build(machine.torch())
    machine.set("XDG_CACHE_HOME", "relative")
    machine.set("HOME", "relative")
    with pytest.raises(shim.Unavailable, match="no home"):
        shim.build(machine.torch())
    assert not Path("relative").exists()


def test_a_home_that_cannot_be_written_and_folders_of_others_are_refused(shim, machine):
    machine.set("XDG_CACHE_HOME", "/proc/nowhere")
    with pytest.raises(shim.Unavailable, match="XDG_CACHE_HOME"):
        shim.build(machine.torch())
    machine.set("XDG_CACHE_HOME", machine.folder / "linked")
    (machine.folder / "linked" / "gruyere").mkdir(parents=True)
    (machine.folder / "elsewhere").mkdir(mode=0o700)
    (machine.folder / "linked" / "gruyere" / "shims").symlink_to(machine.folder / "elsewhere")
    with pytest.raises(shim.Unavailable, match="this user's alone"):
        shim.build(machine.torch())
    # One that is only open too wide is closed.
    machine.set("XDG_CACHE_HOME", machine.folder / "wide")
    wide = machine.folder / "wide" / "gruyere" / "shims"
    wide.mkdir(parents=True)
    wide.chmod(0o777)
    file = shim.build(machine.torch())
    assert wide.stat().st_mode & 0o777 == 0o700
    if os.geteuid() == 0:
        os.chown(wide, 12345, 12345)
        with pytest.raises(shim.Unavailable, match="this user's alone"):
            shim.build(machine.torch())
        os.chown(wide, 0, 0)
    file.chmod(0o666)
    with pytest.raises(shim.Unavailable, match="only this user can write"):
        shim._load(file, "any")


def test_what_is_no_shim_of_this_build_is_not_used(phantom, tmp_path):
    """One of another torch, under the name of the right one; and one that the loader refuses, as
    with an older libstdc++."""
    code = """
import os, torch
from gruyere import _shim
file = _shim.build(torch)
key, whole = _shim.key(torch), file.read_bytes()
assert whole.count(key.encode()) >= 1
def reason(content):
    # A name of its own each time: the loader takes a name that it knows for what it has loaded.
    other = os.path.join(os.environ["HERE"], f"other-{len(content)}.so")
    open(other, "wb").write(content)
    os.chmod(other, 0o600)
    try:
        _shim._load(_shim.Path(other), key)
    except _shim.Unavailable as error:
        return str(error)
assert "was built for another torch" in reason(whole.replace(key.encode(), b"0" * len(key)))
assert "cannot be loaded" in reason(b"no library")
assert _shim._load(file, key).gruyere_shim_is_current() == 0
print("refused")
"""
    ran = phantom.run("", code=code, **settings(HERE=tmp_path))
    assert (ran.code, ran.out.strip()) == (0, "refused"), ran.err


def test_where_there_is_no_native_door_the_pluggable_one_serves_and_one_line_says_why(
    phantom, tmp_path
):
    code = PRELUDE.replace("gpu.install()", "gruyere.enable(door='native')") + """
from gruyere import _enable
assert tensor(4).numel() == 4 * MIB and torch.cuda.get_allocator_backend() == "pluggable"
# As the pluggable door does it.
assert torch.cuda.max_memory_allocated() == 4 * MIB
door, why = _enable.door()
print(door, why)
"""
    ran = phantom.run(
        "", code=code, allocator="door", **settings(XDG_CACHE_HOME=tmp_path, CXX="/nowhere/c++")
    )
    assert ran.code == 0, ran.err
    assert ran.out.startswith("pluggable there is no native door here")
    assert "apt install g++" in ran.out
    (line,) = [line for line in ran.err.splitlines() if "GruyereWarning" in line]
    assert "no C++ compiler" in line and "The pluggable door serves" in line
    # The other ranks of the node keep silent.
    ran = phantom.run(
        "",
        code=code,
        allocator="door",
        **settings(XDG_CACHE_HOME=tmp_path, CXX="/nowhere/c++", LOCAL_RANK=1),
    )
    assert ran.code == 0 and "GruyereWarning" not in ran.err, ran.err


def test_the_doctor_says_how_the_better_door_is_had(phantom):
    ran = launched(phantom, "--door", "pluggable", "--doctor")
    assert (
        ran.returncode == 0
        and "pluggable (door:pluggable); without that setting torch's own interface" in ran.stdout
    ), ran.stdout


def test_the_launch_line_builds_it_and_takes_it(phantom):
    ran = launched(phantom, "--build-shim")
    assert ran.returncode == 0, ran.stderr
    assert Path(ran.stdout.strip()).is_file()
    for asked, why in ((), "door:auto"), (("--door", "native"), "door:native"):
        ran = launched(phantom, *asked, "--doctor")
        assert ran.returncode == 0 and f"native ({why})" in ran.stdout, ran.stdout + ran.stderr


def launched(phantom, *arguments, **others):
    environment = clean_environment() | {
        "LD_PRELOAD": LIBRARIES_PRELOADED,
        "LD_LIBRARY_PATH": str(LIBRARIES),
    }
    environment |= {key: str(value) for key, value in settings(**others).items()}
    command = [sys.executable, "-m", "gruyere", *arguments]
    return subprocess.run(
        command, env=environment, cwd=phantom.folder, capture_output=True, text=True, timeout=300
    )
