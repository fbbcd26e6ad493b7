"""The overlay of `dryrun` and `compare` where there are mounts: whatever they are called and
wherever they are, what is in them stays as it is, and the program writes as it does without a
sandbox.
"""

import os
import shutil
import socket
import stat
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
from test_sandbox import MIB, answer, describe, files, kit, sandboxed, user  # noqa: F401

# Each as a user may have it: a language's letters, what mountinfo writes in octal, and no UTF-8.
NAMES = ["donn\u00e9es", "two words", "a\\134b", "line\nbreak", "x\udcff", "#1"]


@pytest.fixture
def stores(tmp_path, user):  # noqa: F811
    """Folders to mount, each with a file."""
    made = [tmp_path / f"store{number}" for number in range(len(NAMES))]
    for store in made:
        store.mkdir()
        (store / "model.pt").write_text("precious")
        give(user, store, store / "model.pt")
    return made


def give(user, *paths):  # noqa: F811
    if user == "nobody":
        for path in paths:
            os.chown(path, 65534, 65534, follow_symlinks=False)


@pytest.mark.parametrize("where", ["in the working folder", "elsewhere"])
def test_what_is_in_a_mount_is_as_before_whatever_it_is_called(
    where, user, files, stores, tmp_path  # noqa: F811
):  # fmt: skip
    at, names = files, NAMES
    if where == "elsewhere":
        # Alone: beside other mounts it gets an overlay of its own even if its name is misread.
        at, names = tmp_path / "elsewhere", NAMES[:1]
    points = [at / name for name in names]
    for point in points:
        point.mkdir(parents=True)
        give(user, at, point)
    before = [describe(store) for store in stores]
    code = f"""
    from pathlib import Path
    for name in {names!r}:
        folder = Path({str(at)!r}, name)
        assert (folder / "model.pt").read_text() == "precious"
        (folder / "model.pt").write_text("overwritten")
        (folder / "new").mkdir()
        assert (folder / "model.pt").read_text() == "overwritten"
    """
    ran = sandboxed("overlay", user, files, code, mounts=zip(stores, points))
    told = answer(ran, "overlay")
    assert told["code"] == 0, told["said"]
    assert [describe(store) for store in stores] == before


def test_a_folder_with_mounts_below_is_written_to_as_others_are(user, files, stores):  # noqa: F811
    mounts = [(stores[0], files / "data"), (stores[1], files / "runs" / "old")]
    before = describe(files), [describe(store) for store in stores]
    code = """
    import os, shutil
    from pathlib import Path
    assert sorted(os.listdir(".")) == [
        "absolute", "data", "large.bin", "latest", "runs", "small.txt"], os.listdir(".")
    assert os.listdir("data") == ["model.pt"] and os.readlink("latest") == "runs/old"
    Path("new").write_text("new")
    Path("small.txt").write_text("other")
    os.replace("new", "small.txt")
    assert Path("small.txt").read_text() == "new"
    with open("large.bin", "r+b") as file:
        file.write(b"l")
    assert Path("large.bin").read_bytes()[:2] == b"lL"
    os.rename("large.bin", "moved.bin")
    os.remove("absolute")
    os.makedirs("out/deep")
    os.rename("out", "output")
    Path("data/model.pt").write_text("overwritten")
    Path("runs/old/model.pt").write_text("overwritten")
    Path("runs/log.txt").write_text("overwritten")
    Path("runs/new").mkdir()
    Path("../up.txt").write_text("x")
    """
    told = answer(sandboxed("overlay", user, files, code, mounts=mounts), "overlay")
    assert told["code"] == 0, told["said"]
    assert (describe(files), [describe(store) for store in stores]) == before


def test_files_too_large_to_copy_beside_a_mount_are_read(user, files, stores):  # noqa: F811
    code = """
    import errno
    with open("large.bin", "rb") as file:
        assert file.read() == b"L" * (1 << 20)
    try:
        open("large.bin", "wb")
    except OSError as error:
        assert error.errno == errno.EROFS, error
    else:
        raise SystemExit("it is written to")
    open("new", "wb").write(b"x" * (1 << 20))
    """
    mounts = [(stores[0], files / "data")]
    ran = sandboxed("overlay", user, files, code, mounts=mounts, scratch=6 * MIB)
    told = answer(ran, "overlay")
    assert told["code"] == 0, told["said"]
    assert (files / "large.bin").read_bytes() == b"L" * MIB


def test_a_folder_with_mounts_below_can_be_allowed(user, files, stores):  # noqa: F811
    code = """
    from pathlib import Path
    Path("new").write_text("stays")
    Path("data/model.pt").write_text("stays")
    """
    mounts = [(stores[0], files / "data")]
    told = answer(
        sandboxed("overlay", user, files, code, mounts=mounts, allow_writes=["."]), "overlay"
    )
    assert told["code"] == 0, told["said"]
    assert (files / "new").read_text() == (stores[0] / "model.pt").read_text() == "stays"
    assert (stores[1] / "model.pt").read_text() == "precious"


def test_a_working_folder_below_one_that_cannot_be_listed_is_written_to(
    user, files, stores, tmp_path  # noqa: F811
):  # fmt: skip
    tmp_path.chmod(0o711)
    code = """
    from pathlib import Path
    Path("new").write_text("new")
    Path("data/model.pt").write_text("overwritten")
    """
    mounts = [(stores[0], files / "data")]
    told = answer(sandboxed("overlay", user, files, code, mounts=mounts), "overlay")
    assert told["code"] == 0, told["said"]
    assert not (files / "new").exists()
    assert (stores[0] / "model.pt").read_text() == "precious"


@pytest.fixture
def elsewhere(tmp_path):
    """A folder that is near no folder in which a program writes, and read-only there."""
    if os.geteuid() != 0:
        folder = tmp_path / "run"
        folder.mkdir()
    else:
        folder = Path(tempfile.mkdtemp(dir="/run"))
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


@pytest.mark.parametrize("network", [False, True])
def test_what_listens_in_a_folder_with_mounts_below_is_reached_with_the_network_alone(
    user, files, stores, elsewhere, network  # noqa: F811
):  # fmt: skip
    (elsewhere / "below").mkdir()
    os.mkfifo(elsewhere / "pipe")
    reader = os.open(elsewhere / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(elsewhere / "listener"))
        listener.listen()
        for name in ("listener", "pipe"):
            (elsewhere / name).chmod(0o666)
        elsewhere.chmod(0o555)
        code = f"""
        import errno, os, socket
        errors = []
        with socket.socket(socket.AF_UNIX) as mine:
            errors.append(mine.connect_ex({str(elsewhere / "listener")!r}))
        try:
            os.write(os.open({str(elsewhere / "pipe")!r}, os.O_WRONLY | os.O_NONBLOCK), b"x")
            errors.append(0)
        except OSError as error:
            errors.append(error.errno)
        expected = [0, 0] if {network} else [errno.ECONNREFUSED, errno.ENXIO]
        assert errors == expected, errors
        """
        mounts = [(stores[0], elsewhere / "below")]
        ran = sandboxed("overlay", user, files, code, mounts=mounts, allow_network=network)
    os.close(reader)
    told = answer(ran, "overlay")
    assert told["code"] == 0, told["said"]


def test_a_file_in_shared_memory_can_be_allowed(user, files):  # noqa: F811
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        give(user, Path(file.name))
        code = f"""
        import os
        with open({file.name!r}, "w") as file:
            file.write("stays")
        assert os.listdir("/dev/shm") == [os.path.basename({file.name!r})]
        """
        told = answer(
            sandboxed("overlay", user, files, code, allow_writes=[file.name]), "overlay"
        )
        assert told["code"] == 0, told["said"]
        assert Path(file.name).read_text() == "stays"


# Mounts a file system that never answers over a folder, and goes on: no process serves it.
DEAD = """
import ctypes, os, sys
handle = os.open("/dev/fuse", os.O_RDWR)
options = f"fd={handle},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
if ctypes.CDLL(None).mount(b"dead", os.fsencode(sys.argv[1]), b"fuse", 0, options):
    sys.exit("it is not mounted")
os.close(handle)
os.execvp(sys.argv[2], sys.argv[2:])
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or not os.path.exists("/dev/fuse"), reason="root alone mounts it, with FUSE"
)
def test_a_mount_that_does_not_answer_is_in_nobody_s_way(user, files):  # noqa: F811
    (files / "dead").mkdir()
    code = """
    import os
    try:
        os.listdir("dead")
    except OSError:
        pass
    else:
        raise SystemExit("it answers")
    open("new", "w").write("new")
    open("runs/log.txt", "w").write("new")
    """
    around = ["unshare", "-m", sys.executable, "-c", DEAD, files / "dead"]
    told = answer(sandboxed("overlay", user, files, code, around=around), "overlay")
    assert told["code"] == 0, told["said"]
    assert (files / "runs" / "log.txt").read_text() == "kept" and not (files / "new").exists()


@pytest.mark.parametrize("mounted", [False, True])
def test_the_folder_of_the_scratch_is_written_to(
    mounted, user, files, stores, tmp_path  # noqa: F811
):  # fmt: skip
    temporary = tmp_path / "job"
    (temporary / "mount").mkdir(parents=True)
    (temporary / "old").write_text("old")
    give(user, temporary, temporary / "mount", temporary / "old")
    before = describe(temporary)
    code = """
    import os, tempfile
    temporary = os.environ["TMPDIR"]
    assert tempfile.gettempdir() == temporary
    for name in ("scratch.bin", "old"):
        with open(os.path.join(temporary, name), "w") as file:
            file.write("new")
    os.mkdir(os.path.join(temporary, "folder"))
    with open("small.txt", "w") as file:
        file.write("new")
    """
    told = answer(
        sandboxed(
            "overlay", user, files, code, mounts=[(stores[0], temporary / "mount")] * mounted,
            environment={"TMPDIR": str(temporary)},
        ),
        "overlay",
    )  # fmt: skip
    assert told["code"] == 0, told["said"]
    assert describe(temporary) == before


def test_devices_work_and_neither_they_nor_the_kernel_s_settings_are_changed(
    user, files  # noqa: F811
):  # fmt: skip
    name = f"/dev/gruyere-test-{os.getpid()}"
    settings = ["/proc/sys/vm/swappiness", "/proc/sysrq-trigger", "/proc/irq/default_smp_affinity",
                "/sys/kernel/mm/transparent_hugepage/enabled"]  # fmt: skip
    disks = [
        entry.path for entry in os.scandir("/dev")
        if not entry.is_symlink() and stat.S_ISBLK(entry.stat().st_mode)
    ]  # fmt: skip
    code = f"""
    import os, pty
    refused = []
    for path in {[path for path in settings + disks if os.path.exists(path)]!r}:
        try:
            # Nothing is written.
            os.close(os.open(path, os.O_WRONLY))
        except OSError:
            continue
        raise SystemExit(f"{{path}} can be written to")
    try:
        os.close(os.open({name!r}, os.O_WRONLY | os.O_CREAT))
    except OSError:
        pass
    else:
        raise SystemExit("a file is made in /dev")
    for path in ("/dev/null", "/dev/shm/test", "/proc/self/comm"):
        with open(path, "w") as file:
            file.write("x")
    assert len(open("/dev/urandom", "rb").read(8)) == 8
    ours, theirs = pty.openpty()
    os.write(os.open(os.ttyname(theirs), os.O_RDWR | os.O_NOCTTY), b"here")
    assert os.read(ours, 4) == b"here"
    print(open("/proc/sys/vm/swappiness").read())
    """
    try:
        told = answer(sandboxed("overlay", user, files, code), "overlay")
        assert not os.path.exists(name)
    finally:
        if os.path.exists(name):
            os.unlink(name)
    assert told["code"] == 0, told["said"]


# What `gruyere dryrun` says about the error with which a program ends.
SAID = """
import os, sys
sys.path.insert(0, {package!r})
from gruyere._sandbox import remedy
from gruyere._sandbox.reach import Reach
try:
    {change}
except OSError as error:
    print(*map(remedy, Reach(["files", "network"]).behind(error)))
"""


def said_of(change, user, files, **asked):  # noqa: F811
    package = sandboxed.program.parents[3] / "python_loader"
    code = textwrap.dedent(SAID).format(package=str(package), change=change)
    told = answer(sandboxed("overlay", user, files, code, **asked), "overlay")
    assert told["code"] == 0, told["said"]
    return told["said"].strip()


def test_a_folder_that_cannot_be_renamed_is_named_with_what_allows_it(user, files):  # noqa: F811
    change = "os.rename('runs', 'runs.bak')"
    said = said_of(change, user, files)
    assert f"cannot rename {files / 'runs'}" in said and f"--allow-writes={files}," in said
    assert said_of(change, user, files, allow_writes=["."]) == ""
    assert (files / "runs.bak" / "log.txt").read_text() == "kept"


def test_a_file_that_is_allowed_and_is_replaced_is_named_with_its_folder(
    user, files  # noqa: F811
):  # fmt: skip
    change = "open('part', 'w').close(); os.replace('part', 'small.txt')"
    said = said_of(change, user, files, allow_writes=["small.txt"])
    assert str(files / "small.txt") in said and f"--allow-writes={files}," in said
    assert said_of(change, user, files, allow_writes=["."]) == ""
    assert (files / "small.txt").read_text() == ""


def test_a_move_between_two_overlays_is_named_with_what_allows_it(
    user, files, stores  # noqa: F811
):  # fmt: skip
    mounts = [(stores[0], files / "data")]
    change = "open('part', 'w').close(); os.replace('part', 'runs/log.txt')"
    said = said_of(change, user, files, mounts=mounts)
    assert f"cannot rename {files / 'part'} to {files / 'runs' / 'log.txt'}" in said
    assert f"--allow-writes={files}," in said
    change = "open('part', 'w').close(); os.replace('part', 'data/model.pt')"
    assert said_of(change, user, files, mounts=mounts) == ""
    assert said_of("os.rename('data', 'other')", user, files, mounts=mounts) == ""


def test_a_rename_from_one_disk_to_another_is_not_the_sandbox_s_fault(user, files):  # noqa: F811
    change = "open('/dev/shm/part', 'w').close(); os.replace('/dev/shm/part', 'small.txt')"
    assert said_of(change, user, files) == ""
