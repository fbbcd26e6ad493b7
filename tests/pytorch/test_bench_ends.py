"""However `gruyere compare`, `bench --torch` and `dryrun` end, no process of the program stays, and
no folder: where the command itself is killed, the next one removes it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import COMMAND, GRUYERE, PHANTOM, clean_environment
from gruyere._sandbox import Folder, owned
from test_dryrun_ends import runs_still

# Its child has a session of its own, no parent, and passes over signals.
ESCAPES = """
import os, pathlib, subprocess, time
code = "trap '' TERM INT HUP; touch began-$$; exec sleep 500"
subprocess.run(["setsid", "-f", "bash", "-c", code])
while not list(pathlib.Path().glob("began-*")):
    time.sleep(0.01)
pathlib.Path(f"began-{os.getpid()}").touch()
time.sleep(500)
"""
LINES = {
    "compare": ["compare", "--stand-in", "--allow-writes=.", "--", sys.executable, "train.py"],
    "bench": ["bench", "--torch", "--stand-in", "--python", sys.executable, "--allow-writes=.",
              "--runs", "1", "--program", "train.py"],
    "dryrun": ["dryrun", "--python", sys.executable, "--allow-writes=.", "train.py"],
}  # fmt: skip


def folders(base):
    # The native door's shim is kept there where there is no other place for it.
    return [path for path in base.glob("gruyere-*") if path.name != f"gruyere-{os.getuid()}"]


@pytest.mark.parametrize(
    "command, number",
    [
        ("compare", signal.SIGTERM),
        ("compare", signal.SIGKILL),
        ("bench", signal.SIGHUP),
        pytest.param("compare", signal.SIGHUP, marks=pytest.mark.thorough),
        pytest.param("compare", signal.SIGINT, marks=pytest.mark.thorough),
        pytest.param("bench", signal.SIGTERM, marks=pytest.mark.thorough),
        pytest.param("dryrun", signal.SIGHUP, marks=pytest.mark.thorough),
        pytest.param("dryrun", signal.SIGKILL, marks=pytest.mark.thorough),
    ],
)
def test_a_signal_ends_every_process_and_no_folder_stays(tmp_path, monkeypatch, command, number):
    base = tmp_path / "tmp"
    base.mkdir()
    (tmp_path / "train.py").write_text(ESCAPES)
    settings = {
        "GRUYERE_LIBRARY": str(GRUYERE), "GRUYERE_PHANTOM": str(PHANTOM), "TMPDIR": str(base)
    }  # fmt: skip

    def as_in_the_foreground():
        for each in (signal.SIGINT, signal.SIGHUP):
            signal.signal(each, signal.default_int_handler)

    process = subprocess.Popen(
        [COMMAND, *LINES[command]], env=clean_environment() | settings, cwd=tmp_path,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=as_in_the_foreground,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 300
        while len(list(tmp_path.glob("began-*"))) < 2:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
        assert len(folders(base)) == 1
        process.send_signal(number)
        code = process.wait(60)
    finally:
        process.kill()
    pids = [file.name.split("-")[1] for file in tmp_path.glob("began-*")]
    deadline = time.monotonic() + 30
    try:
        while alive := [pid for pid in pids if runs_still(pid)]:
            # Of a command that was killed, the process between it and the program ends them.
            assert number == signal.SIGKILL and time.monotonic() < deadline, alive
            time.sleep(0.1)
    finally:
        for pid in pids:
            if runs_still(pid):
                os.kill(int(pid), signal.SIGKILL)
    if number != signal.SIGKILL:
        assert code == 128 + number
        assert folders(base) == []
        return
    assert code == -number
    assert len(folders(base)) == 1
    monkeypatch.setenv("TMPDIR", str(base))
    # The process that ends the program may need a moment more.
    while swept(base):
        assert time.monotonic() < deadline, folders(base)
        time.sleep(0.1)


@pytest.fixture
def base(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def left_behind(base, name="gruyere-bench-abcdefgh"):
    """A folder as a killed run leaves it."""
    folder = base / name
    (folder / "run-1" / "own").mkdir(parents=True)
    (folder / "run-1" / "own" / "model.pt").write_bytes(b"x")
    owned.own(folder)
    os.close(owned._held.pop(folder))
    return folder


def swept(base):
    with Folder("test"):
        pass
    return folders(base)


def test_a_folder_without_an_owner_is_removed(base):
    left_behind(base)
    assert swept(base) == []


def test_a_folder_of_a_run_stays(base):
    with Folder("dryrun") as mine:
        assert swept(base) == [mine]
        # In another process too, to which no descriptor went.
        code = "from gruyere._sandbox import Folder\nwith Folder('test'): pass"
        path = str(Path(owned.__file__).parents[2])
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, check=True
        )
        assert folders(base) == [mine]
    assert folders(base) == []


def test_a_folder_stays_until_its_run_has_ended_even_if_its_command_is_killed(base):
    folder = base / "gruyere-bench-abcdefgh"
    folder.mkdir()
    owned.own(folder)
    locks = owned.locks(folder)
    with subprocess.Popen(["sleep", "100"], pass_fds=locks) as between:
        os.close(owned._held.pop(folder))
        assert swept(base) == [folder]
        between.kill()
    assert swept(base) == []


def test_a_removal_that_is_interrupted_is_finished_by_a_later_run(base, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Folder("bench") as mine:
        (mine / "run-1").mkdir()
        (mine / "file").touch()
        monkeypatch.setattr(os, "rmdir", interrupted)
    monkeypatch.undo()
    assert folders(base) == [mine]
    os.close(owned._held.pop(mine))
    monkeypatch.setenv("TMPDIR", str(base))
    assert swept(base) == []


def test_what_cannot_be_removed_keeps_its_lock(base, monkeypatch):
    folder = left_behind(base)
    monkeypatch.setattr(owned, "empty", lambda *_: None)
    assert swept(base) == [folder]
    monkeypatch.undo()
    monkeypatch.setenv("TMPDIR", str(base))
    assert swept(base) == []


@pytest.mark.parametrize(
    "how", ["no lock", "a link", "a link as its lock", "another name", "another host's"]
)
def test_a_folder_that_may_be_anothers_stays(base, how, monkeypatch):
    elsewhere = base / "elsewhere"
    elsewhere.mkdir()
    name = "gruyere-bench-letters" if how == "another name" else "gruyere-bench-abcdefgh"
    folder = left_behind(elsewhere if how == "a link" else base, name)
    lock = folder / "lock-of-gruyere"
    if how == "no lock":
        lock.unlink()
    elif how == "a link":
        (base / name).symlink_to(folder)
    elif how == "a link as its lock":
        lock.rename(elsewhere / "lock")
        lock.symlink_to(elsewhere / "lock")
    elif how == "another host's":
        monkeypatch.setattr(owned, "_boot", lambda: b"elsewhere")
    assert swept(base) == [base / name]
    assert (folder / "run-1" / "own" / "model.pt").read_bytes() == b"x"


def test_where_others_may_put_a_folder_in_its_place_nothing_is_removed(base):
    folder = left_behind(base)
    base.chmod(0o777)
    assert swept(base) == [folder]
    base.chmod(0o1777)
    assert swept(base) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_another_users_folder_stays(base):
    folder = left_behind(base)
    os.chown(folder, 65534, 65534)
    assert swept(base) == [folder]
