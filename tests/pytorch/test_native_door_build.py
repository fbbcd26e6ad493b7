"""The native door's shim on the user's machine: what it is built from, where it is kept, and what
happens where it cannot be had.

Most of it needs neither torch nor a real compiler: a torch that is a folder of headers, and a
compiler that writes down that it was called."""

import errno
import importlib
import os
import subprocess
import sys
import tempfile
import time
import types
from contextlib import contextmanager, nullcontext
from multiprocessing import get_context
from pathlib import Path

import pytest

from conftest import LIBRARIES, LIBRARIES_PRELOADED, ROOT, clean_environment
from door import PRELUDE, settings

COMPILER = r"""#!/bin/sh
echo "$@" >> "$FAKE_LOG"
echo $$ >> "$FAKE_LOG.pids"
said() { echo "shim.cpp:1: $1"; eval "$FAKE_END"; exit 1; }
sleep ${FAKE_SECONDS:-0}
if [ -n "$FAKE_ERROR" ]; then said "error: $FAKE_ERROR"; fi
while [ $# != 0 ]; do case "$1" in -o) file=$2 ;; -MF) list=$2 ;; esac; shift; done
case "$file" in "${FAKE_FULL:-none}"/*) said "error: No space left on device" ;; esac
echo built > "$file"
printf 'shim.so: /usr/include/string \\\n %s\n' "$FAKE_HEADERS" > "$list"
"""


@pytest.fixture
def shim(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "python_loader"))
    return importlib.import_module("gruyere._native.shim")


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
        # The temporary folder too.
        (folder / "tmp").mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder / "tmp"))
        self.headers = []
        for name in ("cuda/CUDACachingAllocator", "core/a name", "macros/Macros"):
            header = folder / "torch" / "include" / "c10" / f"{name}.h"
            header.parent.mkdir(parents=True, exist_ok=True)
            header.write_text(f"// {name}")
            self.headers.append(header)
        self.set("FAKE_HEADERS", " ".join(str(one).replace(" ", "\\ ") for one in self.headers))

    @property
    def temporary(self):
        return self.folder / "tmp" / f"gruyere-{os.geteuid()}" / "shims"

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


def left(file):
    """What lies beside a shim, but for the list of the headers that it was built from."""
    names = {path.name for path in file.parent.iterdir()}
    (headers,) = (name for name in names if name.endswith(".headers"))
    assert file.name.startswith(headers[: -len(".headers")])
    return names - {headers}


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
    assert left(file) == {file.name, "lock"}


def test_whatever_it_depends_on_gives_another_file_and_nothing_else_does(shim, machine):
    first = shim.build(machine.torch())
    others = [{"version": "2.11.1"}, {"git": "70da"}, {"cuda": "12.8"}, {"abi": False}]
    files = [first, *(shim.build(machine.torch(**other)) for other in others)]
    # Each header that the compiler has read counts.
    for header in machine.headers:
        before = header.read_text()
        header.write_text(before + " one virtual function more")
        files.append(shim.build(machine.torch()))
        header.write_text(before)
        assert shim.build(machine.torch()) == first
    # Of the compiler nothing is asked, and another one makes no other shim.
    compiler = machine.folder / "compiler"
    compiler.write_text(compiler.read_text() + "# newer\n")
    assert shim.build(machine.torch()) == first
    source = machine.folder / "shim.cpp"
    source.write_text("another source")
    machine.monkeypatch.setattr(shim, "sources", lambda: [source])
    files.append(shim.build(machine.torch()))
    assert len(set(files)) == len(files) == len(machine.calls()) == 9
    assert "-D_GLIBCXX_USE_CXX11_ABI=0" in machine.calls()[4]


def _build(machine_torch_folder, at):
    from gruyere._native import shim

    told = types.SimpleNamespace(git_version="70d9", cuda="13.0")
    torch = types.SimpleNamespace(__version__="2.11.0", __file__=machine_torch_folder, version=told)
    torch._C = types.SimpleNamespace(_GLIBCXX_USE_CXX11_ABI=True)
    return str(shim.build(torch))


def _reason(machine_torch_folder, at):
    from gruyere._native import shim

    try:
        return _build(machine_torch_folder, at)
    except shim.Unavailable as error:
        return str(error)


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
    assert left(Path(files[0])) == {Path(files[0]).name, "lock"}


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


def test_a_stopped_process_that_builds_is_not_waited_for(shim, machine, stopped):
    folder = shim.shim_folders.home()
    holder = stopped(folder)
    start = time.monotonic()
    with pytest.raises(shim.Unavailable, match=f"process {holder.pid} .*is stopped"):
        shim.build(machine.torch())
    assert time.monotonic() - start < 5 and machine.calls() == []
    # Nor by any of eight ranks that start at once.
    with get_context("fork").Pool(8) as ranks:
        said = ranks.starmap(_reason, [(machine.torch().__file__, at) for at in range(8)])
    assert time.monotonic() - start < 5 and all("is stopped" in reason for reason in said)
    holder.kill()
    holder.wait()
    built = shim.build(machine.torch())
    assert built.read_text() == "built\n"
    # What is built already nobody has to wait for.
    stopped(folder)
    assert shim.build(machine.torch()) == built


def test_one_that_goes_on_is_waited_for_with_a_line_until_a_deadline(shim, machine, capfd):
    folder = shim.shim_folders.home()
    with holding(folder) as holder:
        machine.monkeypatch.setattr(shim.shim_folders, "TURN_SECONDS", 1.5)
        start = time.monotonic()
        with pytest.raises(shim.Unavailable, match=f"process {holder.pid} has been building"):
            shim.build(machine.torch())
        assert 1.5 <= time.monotonic() - start < 5 and machine.calls() == []
        (line,) = capfd.readouterr().err.splitlines()
        assert f"waiting for process {holder.pid}" in line and "1.5 s at most" in line
        # Who waits goes on when the shim is there, whether the lock is given back or not.
        machine.monkeypatch.setattr(shim.shim_folders, "TURN_SECONDS", 60)
        with get_context("fork").Pool(1) as pool:
            waits = pool.apply_async(_build, (machine.torch().__file__, 0))
            time.sleep(0.3)
            with machine.monkeypatch.context() as patch:
                patch.setattr(shim.shim_folders, "alone", lambda *_: nullcontext())
                built = shim.build(machine.torch())
            assert waits.get(10) == str(built) and holder.poll() is None
        assert len(machine.calls()) == 1


@contextmanager
def holding(folder):
    """A process that holds the lock of a folder, and goes on."""
    code = STOPS.replace("os.kill(os.getpid(), signal.SIGSTOP)", "sys.stdin.read()")
    words = [sys.executable, "-c", code, folder / "lock"]
    holder = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "holds\n"
        yield holder
    finally:
        holder.communicate()


def test_a_killed_process_leaves_neither_its_compiler_nor_its_files(shim, machine):
    machine.set("FAKE_SECONDS", 60)
    builder = get_context("fork").Process(target=_build, args=(machine.torch().__file__, 0))
    builder.start()
    pids = machine.folder / "calls.pids"
    folder = shim.shim_folders.home()

    def is_there():
        return any(os.path.exists(f"/proc/{pid}/exe") for pid in pids.read_text().split())

    until(lambda: pids.exists() and is_there())
    assert len(list(folder.glob(".building-*"))) == 1
    builder.kill()
    builder.join()
    until(lambda: not is_there() and not list(folder.glob(".building-*")))
    # One that was killed with all that watched it: the next that builds sweeps.
    left_over = folder / ".building-old"
    left_over.mkdir()
    os.utime(left_over, (0, 0))
    machine.set("FAKE_SECONDS", 0)
    file = shim.build(machine.torch())
    assert left(file) == {file.name, "lock"}


def until(is_so):
    end = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("how", ["said by the disk", "seen by the compiler", "noexec"])
def test_a_home_that_is_full_or_noexec_is_replaced_by_a_folder_that_lasts(shim, machine, how):
    folders, home = shim.shim_folders, shim.shim_folders.home()
    if how == "seen by the compiler":
        machine.set("FAKE_FULL", home)
    else:
        real = os.statvfs

        def changed(path):
            about = real(path)
            if not str(path).startswith(str(home)):
                return about
            is_full = how == "said by the disk"
            flags = about.f_flag | (0 if is_full else os.ST_NOEXEC)
            free = 0 if is_full else about.f_bavail
            return types.SimpleNamespace(f_bavail=free, f_frsize=about.f_frsize, f_flag=flags)

        machine.monkeypatch.setattr(folders.os, "statvfs", changed)
    machine.set("FAKE_SECONDS", 0.3)
    start = time.monotonic()
    with get_context("fork").Pool(8) as ranks:
        files = ranks.starmap(_build, [(machine.torch().__file__, at) for at in range(8)])
    # Of eight ranks at once the first one has found out, and the others take what it has built.
    assert time.monotonic() - start < 5 and len(set(files)) == 1
    calls = len(machine.calls())
    assert calls == (2 if how == "seen by the compiler" else 1)
    file = Path(files[0])
    assert file.parent == machine.temporary and file.parent.stat().st_mode & 0o777 == 0o700
    # The next start does not compile again.
    assert shim.build(machine.torch()) == file and len(machine.calls()) == calls
    assert not [path for path in home.iterdir() if path.name.startswith(("shim-", ".building"))
                and not path.name.endswith(".log")]


def test_without_any_folder_it_is_said_of_each(shim, machine):
    machine.set("XDG_CACHE_HOME", "/proc/nowhere")
    machine.monkeypatch.setattr(tempfile, "tempdir", "/proc")
    with pytest.raises(shim.Unavailable, match="XDG_CACHE_HOME.*; .*TMPDIR"):
        shim.build(machine.torch())
    # Another user's, or one whose names others may change, is none.
    root = machine.folder / "open"
    root.mkdir()
    root.chmod(0o777)
    machine.monkeypatch.setattr(tempfile, "tempdir", str(root))
    with pytest.raises(shim.Unavailable, match="other users may rename files in"):
        shim.build(machine.torch())
    assert machine.calls() == []


@pytest.mark.parametrize("version", ["2.4.1", "2.10.0", "2.16.0.dev20270101+cu132", "3.0.0"])
def test_of_a_torch_that_is_not_served_the_version_is_the_reason(shim, machine, version):
    with pytest.raises(shim.Unavailable, match="2\\.11.*2\\.15|newer than 2\\.15"):
        shim.build(machine.torch(version=version))
    assert machine.calls() == []


@pytest.mark.parametrize("version, standard", [("2.13.0", "c++17"), ("2.14.1", "c++20")])
def test_the_headers_of_each_version_have_their_standard_of_cxx(shim, machine, version, standard):
    shim.build(machine.torch(version=version, cuda="13.2"))
    (call,) = machine.calls()
    assert f"-std={standard} " in call and "-DCUDA_VERSION=13020 " in call


@pytest.mark.parametrize(
    "said, words",
    [
        ("fatal error: stdlib.h: No such file or directory", "libc6-dev"),
        ("fatal error: 'compare' file not found", "C\\+\\+ library's header compare"),
        ("fatal error: c10/cuda/CUDAStream.h: No such file or directory", "reinstall torch"),
        ("unrecognized command line option '-std=c++20'", "too old for c\\+\\+20: g\\+\\+ 11"),
        ("error trying to exec 'cc1plus': execvp: No such file", "incomplete: apt install g\\+\\+"),
        ("ld: cannot find -lstdc++", "cannot link .*apt install binutils"),
        ("DeviceStats of this torch is not the one that is known", "a newer gruyere may support"),
    ],
)
def test_a_failure_says_in_words_what_is_missing_and_where_the_rest_is(
    shim, machine, said, words
):
    machine.set("FAKE_ERROR", said)
    with pytest.raises(shim.Unavailable, match=words) as raised:
        shim.build(machine.torch(version="2.15.0"))
    (log,) = shim.shim_folders.home().glob("*.log")
    assert str(log) in str(raised.value)
    told = log.read_text()
    assert "-lc10_cuda" in told.splitlines()[0] and said in told


def test_a_stopped_process_that_builds_leaves_the_pluggable_door(phantom, tmp_path, stopped):
    holder = stopped(tmp_path / "gruyere" / "shims")
    code = PRELUDE.replace("gpu.install()", """
gruyere.enable()""") + """
assert tensor(4).numel() == 4 * MIB and torch.cuda.get_allocator_backend() == "pluggable"
"""
    ran = phantom.run("", code=code, allocator="door", **settings(XDG_CACHE_HOME=tmp_path))
    assert ran.code == 0, ran.err
    (line,) = [line for line in ran.err.splitlines() if "GruyereWarning" in line]
    assert f"process {holder.pid} has been building" in line, line
    assert "The pluggable door is used instead" in line, line


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
        with pytest.raises(shim.Unavailable, match="cannot build the shim|No space left"):
            shim.build(machine.torch())
        # A full disk sends it to the other folder.
        assert len(machine.calls()) == tries * (2 if "No space" in passing else 1)
    machine.set("FAKE_ERROR", "killed")
    machine.set("FAKE_END", "kill -9 $$")
    with pytest.raises(shim.Unavailable):
        shim.build(machine.torch())
    machine.set("FAKE_END", "")
    machine.set("FAKE_ERROR", "")
    machine.set("FAKE_SECONDS", 5)
    machine.monkeypatch.setattr(shim.shim_compiler, "PATIENCE_SECONDS", 0.1)
    with pytest.raises(shim.Unavailable, match="did not finish"):
        shim.build(machine.torch())
    machine.set("FAKE_SECONDS", 0)
    machine.monkeypatch.setattr(shim.shim_compiler, "PATIENCE_SECONDS", 60)
    assert shim.build(machine.torch()).exists()


def test_another_compiler_is_tried_where_one_has_refused(shim, machine):
    machine.set("FAKE_ERROR", "sorry, unimplemented")
    for _ in range(2):
        with pytest.raises(shim.Unavailable, match="sorry"):
            shim.build(machine.torch())
    assert len(machine.calls()) == 1
    machine.set("FAKE_ERROR", "")
    compiler = machine.folder / "compiler"
    compiler.write_text(compiler.read_text() + "# newer\n")
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
            patch.setattr(tempfile, "mkdtemp", refusing(errno.EROFS))
            assert shim.build(machine.torch()) == real
            with pytest.raises(shim.Unavailable, match="Read-only file system"):
                shim.build(machine.torch(git="another"))
    # No room to remember a failure in: it is the failure that is told, and nothing half is left.
    machine.set("FAKE_ERROR", "abstract type")
    with machine.monkeypatch.context() as patch:
        patch.setattr(os, "fdopen", refusing(errno.ENOSPC))
        with pytest.raises(shim.Unavailable, match="abstract type"):
            shim.build(machine.torch(git="another"))
    assert {name for name in left(real) if not name.endswith(".log")} == {real.name, "lock"}
    machine.set("FAKE_ERROR", "")
    with machine.monkeypatch.context() as patch:
        patch.setattr(Path, "lstat", refusing(errno.ENOENT))
        with pytest.raises(shim.Unavailable):
            shim.install(machine.torch())
    machine.set("CXX", 'g++ "')
    with pytest.raises(shim.Unavailable, match="CXX"):
        shim.install(machine.torch(git="third"))
    machine.set("CXX", machine.folder / "compiler")
    sources = shim.sources()
    machine.monkeypatch.setattr(shim, "sources", lambda: sources)
    with machine.monkeypatch.context() as patch:
        patch.setattr(Path, "glob", refusing(errno.EIO))
        with pytest.raises(shim.Unavailable, match="Input/output error"):
            shim.build(machine.torch(git="third"))


def test_the_folder_above_is_the_users_own_too_and_there_must_be_a_home(shim, machine):
    machine.monkeypatch.setattr(tempfile, "tempdir", "/proc")
    above = machine.folder / "open" / "gruyere"
    above.mkdir(parents=True)
    above.chmod(0o777)
    machine.set("XDG_CACHE_HOME", above.parent)
    shim.build(machine.torch())
    assert above.stat().st_mode & 0o022 == 0
    if os.geteuid() == 0:
        os.chown(above, 12345, 12345)
        with pytest.raises(shim.Unavailable, match="private folder of this user"):
            shim.build(machine.torch())
    above.rename(above.with_name("elsewhere"))
    above.symlink_to(above.with_name("elsewhere"))
    with pytest.raises(shim.Unavailable, match="private folder of this user"):
        shim.build(machine.torch())
    machine.set("XDG_CACHE_HOME", "relative")
    machine.set("HOME", "relative")
    with pytest.raises(shim.Unavailable, match="no home"):
        shim.build(machine.torch())
    assert not Path("relative").exists()


def test_a_home_that_cannot_be_written_and_folders_of_others_are_refused(shim, machine):
    machine.monkeypatch.setattr(tempfile, "tempdir", "/proc")
    machine.set("XDG_CACHE_HOME", "/proc/nowhere")
    with pytest.raises(shim.Unavailable, match="XDG_CACHE_HOME"):
        shim.build(machine.torch())
    machine.set("XDG_CACHE_HOME", machine.folder / "linked")
    (machine.folder / "linked" / "gruyere").mkdir(parents=True)
    (machine.folder / "elsewhere").mkdir(mode=0o700)
    (machine.folder / "linked" / "gruyere" / "shims").symlink_to(machine.folder / "elsewhere")
    with pytest.raises(shim.Unavailable, match="private folder of this user"):
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
        with pytest.raises(shim.Unavailable, match="private folder of this user"):
            shim.build(machine.torch())
        os.chown(wide, 0, 0)
    file.chmod(0o666)
    with pytest.raises(shim.Unavailable, match="only this user can write"):
        shim.install(machine.torch())
    file.chmod(0o700)
    # A link, as the sandbox of links has, leads to a file that only the user can replace.
    apart = machine.folder / "apart"
    apart.mkdir(mode=0o700)
    file.rename(apart / file.name)
    file.symlink_to(apart / file.name)
    shim.shim_folders.check_owner(file)
    apart.chmod(0o777)
    with pytest.raises(shim.Unavailable, match="only this user can write"):
        shim.install(machine.torch())


def test_what_is_no_shim_of_this_build_is_not_used(phantom, tmp_path):
    """One of another torch, under the name of the right one; and one that the loader refuses, as
    with an older libstdc++."""
    code = """
import os, torch
from gruyere._native import shim
file = shim.build(torch)
key, whole = shim.key(torch), file.read_bytes()
assert whole.count(key.encode()) >= 1
def reason(content):
    # A name of its own each time: the loader takes a name that it knows for what it has loaded.
    other = os.path.join(os.environ["HERE"], f"other-{len(content)}.so")
    open(other, "wb").write(content)
    os.chmod(other, 0o600)
    try:
        shim._load(shim.Path(other), key)
    except shim.Unavailable as error:
        return str(error)
assert "was built for another torch" in reason(whole.replace(key.encode(), b"0" * len(key)))
assert "cannot be loaded" in reason(b"no library")
assert shim._load(file, key).gruyere_shim_is_current() == 0
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
    assert ran.out.startswith("pluggable the native door is not available")
    assert "apt install g++" in ran.out
    (line,) = [line for line in ran.err.splitlines() if "GruyereWarning" in line]
    assert "no C++ compiler" in line and "The pluggable door is used instead" in line
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
        and "pluggable (door:pluggable); without that setting Gruyère uses the" in ran.stdout
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
