"""What the sandbox keeps, beside `test_sandbox.py`: from programs that put links where the sandbox
itself writes and removes, on kernels with an old Landlock, and outside the files."""
# ruff: noqa: F401, F811 (fixtures are imported)

import os
import shutil
import stat

import pytest
from test_sandbox import MIB, answer, files, kit, sandboxed, user, way

from gruyere._sandbox.folders import remove


def test_what_is_removed_at_the_end_leads_to_no_file_of_the_user_s(way, user, files):
    code = f"""
    import os
    os.makedirs("cache/snap")
    for number, name in enumerate(("beside.bin", "home/notes.txt", "home")):
        os.symlink(os.path.join({str(files.parent.parent)!r}, name), f"cache/snap/{{number}}")
    os.chmod("cache/snap", 0o555)
    os.chmod("cache", 0)
    os.chmod("data", 0o555)
    os.chmod("runs/old", 0o500)
    """
    root = files.parent.parent
    names = [root / name for name in ("beside.bin", "home", "home/notes.txt")]
    names += [files / "data" / "deep", files / "large.bin", files / "runs" / "old" / "model.pt"]
    before = [stat.S_IMODE(name.lstat().st_mode) for name in names]
    told = answer(sandboxed(way, user, files, code), way)
    assert told["code"] == 0, told["said"] + str(told)
    assert [stat.S_IMODE(name.lstat().st_mode) for name in names] == before


def test_a_folder_is_removed_however_deep_it_is(tmp_path):
    kept = tmp_path / "kept"
    kept.write_text("kept")
    kept.chmod(0o400)
    top = tmp_path / "top"
    top.mkdir()
    here = os.open(top, os.O_RDONLY)
    for _ in range(1_500):
        os.symlink(kept, "link", dir_fd=here)
        os.mkdir("inner", dir_fd=here)
        below = os.open("inner", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    remove(top)
    assert os.listdir(tmp_path) == ["kept"]
    assert stat.S_IMODE(kept.stat().st_mode) == 0o400 and kept.read_text() == "kept"


def test_the_sandbox_writes_through_no_link_of_the_program_s(user, files):
    # What the sandbox wrote beside a file that it copied had a name that the program could guess.
    code = f"""
    import os, threading
    beside = {str(files.parent.parent / "beside.bin")!r}
    for name in ("large.bin", "data/deep/x.bin", "data/deep"):
        os.symlink(beside, name + ".gruyere-part")
    with open("large.bin", "r+b") as file:
        file.write(b"EVIL")
    with open("data/deep/x.bin", "r+b") as file:
        file.write(b"EVIL")
    # A folder that becomes a link to another one while files in it are copied.
    os.makedirs("swapped/real")
    os.symlink(os.path.dirname(beside), "swapped/link")
    os.rename("swapped/real", "swapped/here")
    ended = False

    def swap():
        while not ended:
            os.rename("swapped/here", "swapped/real")
            os.rename("swapped/link", "swapped/here")
            os.rename("swapped/here", "swapped/link")
            os.rename("swapped/real", "swapped/here")

    thread = threading.Thread(target=swap)
    thread.start()
    for _ in range(200):
        try:
            open("swapped/here/beside.bin", "r+b").write(b"EVIL")
        except OSError:
            pass
    ended = True
    thread.join()
    """
    beside = files.parent.parent / "beside.bin"
    told = answer(sandboxed("landlock", user, files, code), "landlock")
    assert told["code"] == 0, told["said"] + str(told)
    assert beside.read_bytes() == b"B" * MIB and os.listdir(files.parent.parent / "home")
    assert (files / "large.bin").read_bytes() == b"L" * MIB


def test_two_names_of_a_file_stay_one_file(user, files):
    code = """
    import os
    os.link("large.bin", "hard.bin")
    os.link("absolute", "absolute2")
    assert os.path.islink("absolute2")
    os.link("data/deep/x.bin", "runs/x.bin", follow_symlinks=True)
    for one, other in (("large.bin", "hard.bin"), ("data/deep/x.bin", "runs/x.bin")):
        assert os.path.samefile(one, other)
        for number, name in enumerate((one, other, one)):
            with open(name, "r+b") as file:
                file.write(str(number).encode())
            assert open(one, "rb").read(1) == open(other, "rb").read(1) == str(number).encode()
        assert os.path.samefile(one, other) and os.stat(one).st_nlink == 2
    # A link of the program's own, where one of the sandbox's was.
    os.remove("small.txt")
    os.symlink("runs/log.txt", "small.txt")
    open("small.txt", "w").write("through")
    assert os.path.islink("small.txt") and open("runs/log.txt").read() == "through"
    """
    told = answer(sandboxed("landlock", user, files, code), "landlock")
    assert told["code"] == 0, told["said"] + str(told)
    assert (files / "large.bin").read_bytes() == b"L" * MIB


def old_landlock(tmp_path, version):
    """A package for which this kernel's Landlock has an earlier version."""
    kit = tmp_path / "old"
    shutil.copytree(sandboxed.program.parents[3], kit)
    kernel = kit / "python_loader" / "gruyere" / "_sandbox" / "kernel.py"
    text = kernel.read_text()
    asks = "return _syscall(_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(1))"
    assert asks in text
    kernel.write_text(text.replace(asks, f"return {version}"))
    for path in (kit, *kit.rglob("*")):
        path.chmod(0o755)
    return kit / "tests" / "pytorch" / "programs" / "sandboxed.py"


@pytest.mark.parametrize("version", [1, 2])
def test_an_old_landlock_lets_no_file_be_emptied(version, user, files, tmp_path, monkeypatch):
    monkeypatch.setattr(sandboxed, "program", old_landlock(tmp_path, version))
    secret = files / "secret.bin"
    secret.write_bytes(b"S" * MIB)
    # It can be written to and not read, so there is no copy of it.
    secret.chmod(0o200)
    if user == "nobody":
        os.chown(secret, 65534, 65534)
    code = f"""
    import os
    beside = {str(files.parent.parent / "beside.bin")!r}
    os.chdir("runs")
    names = [beside, {str(files / "large.bin")!r}]
    if os.geteuid():
        names.append("../secret.bin")
    for name in names:
        for change in (
            lambda: os.truncate(name, 0),
            lambda: os.truncate(name, 5),
            lambda: os.open(name, os.O_RDONLY | os.O_TRUNC),
            lambda: os.open(name, os.O_WRONLY | os.O_TRUNC),
        ):
            try:
                change()
            except PermissionError:
                continue
            raise SystemExit(f"{{name}} is changed")
    # Its own are emptied as before.
    os.truncate("../large.bin", 5)
    os.close(os.open("log.txt", os.O_RDONLY | os.O_TRUNC))
    assert os.stat("../large.bin").st_size == 5 and os.stat("log.txt").st_size == 0
    """
    told = answer(sandboxed("landlock", user, files, code), "landlock")
    assert told["code"] == 0, told["said"] + str(told)
    assert (files.parent.parent / "beside.bin").read_bytes() == b"B" * MIB
    assert (files / "large.bin").read_bytes() == b"L" * MIB
    assert secret.stat().st_size == MIB
    assert {"kind": "write", "name": str(files.parent.parent / "beside.bin")} in told["refused"]
