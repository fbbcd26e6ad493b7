"""What the sandbox keeps, beside `test_sandbox.py`: from programs that put links where the sandbox
itself writes and removes, on kernels with an old Landlock, and outside the files."""
# ruff: noqa: F401, F811 (fixtures are imported)

import os
import stat

from test_sandbox import answer, files, kit, sandboxed, user, way

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
    assert told["code"] == 0, told
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
