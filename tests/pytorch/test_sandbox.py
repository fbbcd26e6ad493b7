"""The sandbox of `dryrun` and `compare`: a program writes as it likes, and its files are as before.

In each way that the kernel can keep that, as root and as nobody. What a container forbids is
forbidden here too, by a filter (`without_calls.py`).
"""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from gruyere import GruyereError
from gruyere._sandbox import box

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
MIB = 1 << 20
WAYS = {"overlay": "", "landlock": "unshare"}


def interpreter(nobody):
    """An interpreter that this user may run."""
    for python in (sys.executable, "/usr/bin/python3"):
        words = [sys.executable, HERE / "without_calls.py", "no-root" if nobody else "", python]
        if subprocess.run([*words, "-c", ""], capture_output=True).returncode == 0:
            return python
    pytest.fail("no Python here can be run by nobody: install Debian's python3")


@pytest.fixture(params=["root", "nobody"])
def user(request):
    if request.param == "nobody" and os.geteuid() != 0:
        pytest.skip("only root can become nobody; these tests run as a user who is not root")
    return request.param


def readable(folder):
    """Everybody may go there."""
    for here in (folder, *folder.parents):
        if here != Path("/") and not here.stat().st_mode & stat.S_IXOTH:
            here.chmod(here.stat().st_mode | stat.S_IXOTH | stat.S_IROTH)


@pytest.fixture(scope="module")
def kit(tmp_path_factory):
    """What runs in these tests, where nobody may read it: this clone may lie where they may not."""
    folder = tmp_path_factory.mktemp("kit")
    program = Path("tests", "pytorch", "programs", "sandboxed.py")
    (folder / program).parent.mkdir(parents=True)
    shutil.copy(ROOT / program, folder / program)
    package = Path("python_loader", "gruyere")
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / package, folder / package, ignore=ignored)
    for path in folder.rglob("*"):
        path.chmod(0o755)
    readable(folder)
    return folder / program


@pytest.fixture(params=WAYS)
def way(request):
    return request.param


def describe(folder):
    """All that a folder is: names, kinds, modes, times, contents."""
    found = {}
    for where, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = Path(where, name)
            told = path.lstat()
            content = None
            if path.is_symlink():
                content = os.readlink(path)
            elif path.is_file():
                content = path.read_bytes()
            found[str(path)] = (told.st_mode, told.st_mtime_ns, told.st_uid, content)
    return found


@pytest.fixture
def files(tmp_path, user, kit):
    """A folder as a user has it; their home is above it."""
    sandboxed.program = kit
    home = tmp_path / "home"
    project = home / "project"
    (project / "runs" / "old").mkdir(parents=True)
    (project / "data" / "deep").mkdir(parents=True)
    (project / "small.txt").write_text("small")
    (project / "large.bin").write_bytes(b"L" * MIB)
    (project / "runs" / "log.txt").write_text("kept")
    (project / "runs" / "old" / "model.pt").write_bytes(b"M" * MIB)
    (project / "data" / "deep" / "x.bin").write_bytes(b"X" * MIB)
    (project / "latest").symlink_to("runs/old")
    (project / "absolute").symlink_to(project / "large.bin")
    (home / "notes.txt").write_text("n" * MIB)
    (tmp_path / "beside.bin").write_bytes(b"B" * MIB)
    if user == "nobody":
        for path in (home, *home.rglob("*"), tmp_path / "beside.bin"):
            os.chown(path, 65534, 65534, follow_symlinks=False)
        readable(tmp_path)
    return project


# Mounts each folder over the next, for what follows "--" alone.
MOUNTING = 'while [ "$1" != -- ]; do mount --bind "$1" "$2"; shift 2; done; shift; exec "$@"'


def sandboxed(way, user, files, code, forbid="", mounts=(), environment=(), around=(), **asked):
    """`mounts`: of each mount, the folder that is mounted and the one that it is mounted over.
    `around`: a command that starts all the rest."""
    words = ",".join(filter(None, [WAYS.get(way, way), forbid, "no-root" * (user == "nobody")]))
    python = interpreter(user == "nobody")
    program = files.parent / "program.py"
    program.write_text(textwrap.dedent(code))
    program.chmod(0o644)
    apart = []
    if mounts:
        alone = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
        flat = [folder for mount in mounts for folder in mount]
        apart = [*alone, "sh", "-ec", MOUNTING, "sh", *flat, "--"]
    return subprocess.run(
        [*around, *apart, sys.executable, HERE / "without_calls.py", words, python,
         sandboxed.program, json.dumps(asked), python, program],
        cwd=files, env={**os.environ, "HOME": str(files.parent), **dict(environment)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def answer(ran, way):
    assert ran.returncode == 0, ran.stdout + ran.stderr
    told = json.loads(ran.stdout)
    assert told["way"] == way, told
    assert not os.path.exists(told["folder"]), "its folder is left"
    return told


# Every way to change files that programs have, and each must look as if it had worked.
WRITES = """
import os, shutil, sqlite3, subprocess
from pathlib import Path

MIB = 1 << 20
assert Path("large.bin").read_bytes() == b"L" * MIB
assert Path("latest/model.pt").stat().st_size == MIB
assert sorted(os.listdir(".")) == [
    "absolute", "data", "large.bin", "latest", "runs", "small.txt"], os.listdir(".")
assert sorted(p.name for p in Path(".").rglob("*.bin")) == ["large.bin", "x.bin"]

Path("small.txt").write_text("other")
assert Path("small.txt").read_text() == "other"
with open("large.bin", "ab") as file:
    file.write(b"more")
assert Path("large.bin").read_bytes() == b"L" * MIB + b"more"
with open("runs/old/model.pt", "r+b") as file:
    file.seek(MIB // 2)
    file.write(b"Z")
assert Path("latest/model.pt").read_bytes()[MIB // 2 : MIB // 2 + 2] == b"ZM"
with open("latest/model.pt", "wb") as file:
    file.write(b"new")
assert Path("runs/old/model.pt").read_bytes() == b"new"
with open("absolute", "r+b") as file:
    file.write(b"a")
assert Path("large.bin").read_bytes()[:2] == b"aL"
os.truncate("data/deep/x.bin", 3)
assert Path("data/deep/x.bin").read_bytes() == b"XXX"
os.chmod("small.txt", 0o600)
os.chmod("large.bin", 0o600)
os.utime("large.bin", (1, 1))
assert os.stat("large.bin").st_mode & 0o777 == 0o600 and os.stat("large.bin").st_mtime == 1
Path("part").write_text("whole")
os.replace("part", "small.txt")
assert Path("small.txt").read_text() == "whole"
os.rename("large.bin", "moved.bin")
assert Path("moved.bin").read_bytes()[:2] == b"aL" and not Path("large.bin").exists()
os.link("moved.bin", "linked.bin")
Path("linked.bin").write_bytes(b"both")
assert Path("moved.bin").read_bytes() == b"both"
os.makedirs("out/deep/er")
Path("out/deep/er/file").write_text("x")
shutil.rmtree("runs")
assert not Path("runs").exists()
os.mkdir("runs")
Path("runs/log.txt").write_text("again")
database = sqlite3.connect("runs/db")
database.execute("create table t (x)")
database.commit()
subprocess.run(["cp", "moved.bin", "data/deep/x.bin"], check=True)
assert Path("data/deep/x.bin").read_bytes() == b"both"
os.remove("data/deep/x.bin")
os.rmdir("data/deep")
notes = Path.home() / "notes.txt"
notes.write_text("gone")
assert notes.read_text() == "gone"
(Path.home() / ".cache" / "new").mkdir(parents=True)
Path("../up.txt").write_text("x")
print("all done")
"""


def test_a_program_may_write_and_its_files_are_as_before(way, user, files):
    before = describe(files.parent.parent)
    told = answer(sandboxed(way, user, files, WRITES), way)
    (files.parent / "program.py").unlink()
    assert (told["code"], told["said"].strip()) == (0, "all done"), told
    after = describe(files.parent.parent)
    home = str(files.parent)
    # The test's own program came and went there.
    assert {**after, home: None} == {**before, home: None}


def test_what_lies_elsewhere_is_as_before_too_and_what_is_refused_has_a_name(way, user, files):
    beside = files.parent.parent / "beside.bin"
    before = beside.lstat(), beside.read_bytes()
    code = f"""
    import os
    failed = 0
    for change in (
        lambda: open({str(beside)!r}, "wb").write(b"x"),
        lambda: os.chmod({str(beside)!r}, 0o777),
        lambda: os.utime({str(beside)!r}, (1, 1)),
        lambda: os.remove({str(beside)!r}),
    ):
        try:
            change()
        except PermissionError:
            failed += 1
    print(failed)
    """
    told = answer(sandboxed(way, user, files, code), way)
    after = beside.lstat()
    assert (after.st_mode, after.st_mtime_ns) == (before[0].st_mode, before[0].st_mtime_ns)
    assert beside.read_bytes() == before[1]
    if way == "landlock":
        assert {"kind": "write", "name": str(beside)} in told["refused"]
    assert int(told["said"]) == {"overlay": 0, "landlock": 4}[way]


def test_only_loopback_is_reached(way, user, files):
    code = """
    import errno, socket, threading
    server = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=lambda: server.accept()[0].sendall(b"here")).start()
    with socket.create_connection(server.getsockname()) as client:
        assert client.recv(4) == b"here"
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(socket.AF_INET, kind) as away:
            try:
                away.connect(("192.0.2.1", 53))
            except OSError as error:
                assert error.errno == errno.ENETUNREACH, error
            else:
                raise SystemExit("it is reached")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as away:
        try:
            away.sendto(b"x", ("192.0.2.1", 53))
        except OSError as error:
            assert error.errno == errno.ENETUNREACH, error
        else:
            raise SystemExit("it is reached")
    """
    told = answer(sandboxed(way, user, files, code), way)
    assert told["code"] == 0, told
    if way == "landlock":
        assert {"kind": "network", "name": "192.0.2.1:53"} in told["refused"]


def test_what_the_user_allows_stays(way, user, files):
    code = """
    from pathlib import Path
    Path("runs/log.txt").write_text("stays")
    Path("runs/new").mkdir()
    Path("small.txt").write_text("goes")
    """
    told = answer(sandboxed(way, user, files, code, allow_writes=["runs"]), way)
    assert told["code"] == 0, told
    assert (files / "runs" / "log.txt").read_text() == "stays"
    assert (files / "runs" / "new").is_dir()
    assert (files / "small.txt").read_text() == "small"


def test_what_the_program_leaves_running_is_ended(way, user, files):
    code = """
    import os, subprocess
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execvp("sleep", ["sleep", "1000"])
        os._exit(0)
    os.wait()
    print(child.pid)
    """
    told = answer(sandboxed(way, user, files, code), way)
    pid = int(told["said"])
    assert not os.path.exists(f"/proc/{pid}")
    sleeping = subprocess.run(["pgrep", "-x", "-f", "sleep 1000"], capture_output=True, text=True)
    assert sleeping.stdout == ""


def test_the_end_is_the_program_s(way, user, files):
    told = answer(sandboxed(way, user, files, "raise SystemExit(7)"), way)
    assert told["code"] == 7
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    told = answer(sandboxed(way, user, files, killed), way)
    assert told["code"] == -signal.SIGSEGV


def test_a_run_that_writes_too_much_is_ended(way, user, files):
    code = """
    import os, time
    for number in range(64):
        with open(f"file{number}", "wb") as file:
            file.write(os.urandom(1 << 20))
    time.sleep(30)
    """
    began = time.monotonic()
    told = answer(sandboxed(way, user, files, code, scratch=32 * MIB), way)
    assert told["code"] is None and "--scratch" in told["reason"], told
    assert "32 MiB" in told["reason"] and time.monotonic() - began < 25


def test_a_copy_that_is_too_large_is_refused_by_its_name(user, files):
    code = """
    import errno
    try:
        open("large.bin", "ab")
    except OSError as error:
        assert error.errno == errno.ENOSPC, error
    open("large.bin", "wb").write(b"x")
    """
    told = answer(sandboxed("landlock", user, files, code, scratch=MIB // 2), "landlock")
    assert told["code"] == 0, told
    assert told["refused"] == [{"kind": "space", "name": str(files / "large.bin")}]


@pytest.mark.thorough
def test_folders_beyond_those_mirrored_one_by_one_are_there_and_written_to(user, files):
    many = files / "data" / "many"
    many.mkdir()
    for number in range(2_100):
        (many / str(number)).touch()
    (many / "inner").mkdir()
    (many / "inner" / "large").write_bytes(b"I" * MIB)
    code = """
    import os
    assert len(os.listdir("data/many")) == 2_101
    with open("data/many/inner/large", "ab") as file:
        file.write(b"more")
    assert os.stat("data/many/inner/large").st_size == (1 << 20) + 4
    os.remove("data/many/7")
    assert len(os.listdir("data/many")) == 2_100
    """
    told = answer(sandboxed("landlock", user, files, code), "landlock")
    assert told["code"] == 0, told
    assert (many / "7").exists() and (many / "inner" / "large").stat().st_size == MIB


def test_many_processes_write_to_one_file(way, files):
    if os.geteuid() == 0:
        shutil.chown(files, 0)
    code = """
    import multiprocessing, os

    def add(number):
        handle = os.open("large.bin", os.O_WRONLY | os.O_APPEND)
        os.write(handle, b"+")

    if __name__ == "__main__":
        with multiprocessing.get_context("fork").Pool(8) as pool:
            pool.map(add, range(64), chunksize=1)
        data = open("large.bin", "rb").read()
        assert len(data) == (1 << 20) + 64, len(data)
    """
    told = answer(sandboxed(way, "root", files, code), way)
    assert told["code"] == 0, told
    assert (files / "large.bin").stat().st_size == MIB


def test_where_neither_way_holds_nothing_runs(user, files):
    ran = sandboxed("unshare", user, files, "open('x', 'w')", forbid="landlock_create_ruleset")
    assert ran.returncode == 1 and "--allow-writes" in ran.stderr, ran.stderr
    assert "overlay: " in ran.stderr and "landlock: " in ran.stderr
    assert not (files / "x").exists()
    allowed = sandboxed(
        "unshare", user, files, "open('x', 'w')", forbid="landlock_create_ruleset",
        allow_writes=[""],
    )  # fmt: skip
    assert answer(allowed, "none")["code"] == 0
    assert (files / "x").exists()


def test_a_folder_that_is_allowed_and_is_not_there_is_an_error(user, files):
    ran = sandboxed("overlay", user, files, "", allow_writes=["nowhere"])
    assert ran.returncode == 1 and "nowhere: no such file or folder" in ran.stderr


@pytest.mark.parametrize("way", [None, "overlay"])
def test_a_sandbox_that_gives_no_answer_is_not_laid_to_the_kernel(tmp_path, monkeypatch, way):
    """`way`: the only one without an answer; None: all."""
    monkeypatch.setattr(box, "_PATIENCE", 0)
    monkeypatch.setattr(box.landlock, "why_not", lambda: "no Landlock here" if way else "")
    asked = {"allow_writes": [], "allow_network": False, "scratch": 1 << 30}
    with pytest.raises(GruyereError) as error:
        box.choose(tmp_path, asked)
    said = str(error.value)
    assert "(overlay: no answer in 30 s; landlock: no" in said
    assert "The machine may be busy: try again. If it is not, use a kernel" in said
